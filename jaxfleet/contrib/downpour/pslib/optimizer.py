"""DistributedAdam and DownpourOptimizer: jobs of several losses, programs and tables."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxfleet.analysis.updates import LOOKUPS
from jaxfleet.contrib.downpour.descriptions import DownpourTrainerParameter, PSParameter
from jaxfleet.contrib.downpour.node import SKIPPED, leave_out_of_startup, split_pairs
from jaxfleet.contrib.downpour.pslib.node import (
    CTR,
    DUMPED,
    HEAD,
    VALUE,
    DownpourServer,
    DownpourWorker,
)
from jaxfleet.contrib.downpour.text_format import from_file
from jaxfleet.contrib.downpour.worker_program import FLEET_ROWS
from jaxfleet.errors import UnsupportedError
from jaxfleet.fluid.argument_checks import check_type, mistake, warn_no_effect
from jaxfleet.fluid.backward import append_backward
from jaxfleet.fluid.distribute_lookup_table import (
    find_distributed_lookup_table_inputs,
    find_distributed_lookup_table_outputs,
)
from jaxfleet.fluid.framework.program import Program, default_startup_program
from jaxfleet.fluid.framework.variable import Pairs, Parameter, Variable
from jaxfleet.fluid.optimizer import AdamOptimizer, Optimizer
from jaxfleet.fluid.scope import global_scope

Strategy = Mapping[str, Any]
_LOSSES_HINT = "a loss, or a list of them"

# Entries of `_fleet_opt` besides the tables, with their defaults.
_OPTIONS: Mapping[str, Any] = {
    "use_cvm": False,
    "no_cvm": False,
    "stat_var_names": [],
    "local_tables": [],
    "async_tables": [],
    "scale_datanorm": -1,
    "check_nan_var_names": [],
    "dump_slot": False,
    "dump_converter": "",
    "dump_fields": [],
    "dump_file_num": 16,
    "dump_fields_path": "",
    "dump_param": [],
    "loss_names": [],
    "adjust_ins_weight": {},
    "copy_table": {},
}
_NOTHING_DUMPED = "no samples are dumped; fetch_list shows values while files train"
# The options stored in `_fleet_opt` for scripts to read; they have no effect here.
_NO_EFFECT: Mapping[str, str] = {
    **dict.fromkeys((n for n in _OPTIONS if n.startswith("dump_")), _NOTHING_DUMPED),
    "check_nan_var_names": "set FLAGS_check_nan_inf, which checks all that a step makes",
    "adjust_ins_weight": "samples count as the loss weighs them",
    "scale_datanorm": "gradients of data_norm's counts are added as they are",
    "local_tables": "tables are on the servers, or in this process where there are none",
    "async_tables": "staleness limits for all tables how far workers may be ahead",
    "copy_table": "tables keep their own rows",
}


class DistributedAdam:
    """Adds the gradients of losses, and describes the tables that servers update with them.

    Servers use pslib's Adam and Adagrad, whatever the script's optimizer is.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._window = 1
        self.type = "downpour"

    def minimize(
        self,
        losses: Sequence[Variable],
        startup_program: Sequence[Program | None] | None = None,
        parameter_list: Sequence[Parameter | str] | None = None,
        no_grad_set: Collection[str | Variable] | None = None,
        strategy: Strategy | None = None,
    ) -> tuple[list[Any], list[Pairs], dict[str, Any]]:
        """Returns no operators, the (parameter, gradient) pairs of each loss, and `_fleet_opt`.

        Args:
            losses: one or several, of one program or several.
            startup_program: initializes the parameters, one per loss; the default one unless given.
            parameter_list: parameters to differentiate; all trained ones unless given.
            no_grad_set: variables at which gradients stop.
            strategy: options of each table by its name, of `dense_table` and `datanorm_table`, and
                of `_fleet_opt`; `fleet_desc_file` names a description in text form that takes
                precedence.

        Raises:
            ValueError: the strategy is invalid.
        """
        said = {} if strategy is None else strategy
        for name, reason in _NO_EFFECT.items():
            if said.get(name, _OPTIONS[name]) != _OPTIONS[name]:
                warn_no_effect(f"the strategy's '{name}'", reason)
        job = _Job(_programs(losses), said, self._window)
        found = []
        for loss in losses:
            pairs = append_backward(loss, parameter_list, no_grad_set)
            found.append(sorted(pairs, key=lambda pair: pair[0].name))
            job.add_loss(loss.block.program, found[-1])
        for startup in startup_program or [None]:
            leave_out_of_startup(startup or default_startup_program(), job.table_ids)
        return [], found, job.opt_info()


class _Job:
    """A job of several programs while its losses are added."""

    def __init__(self, programs: Sequence[Program], strategy: Strategy, window: int) -> None:
        self._strategy, self._programs = strategy, programs
        self._tables = {id(program): _tables_of(program) for program in programs}
        names = dict.fromkeys(name for found in self._tables.values() for name in found)
        self.table_ids = {name: number for number, name in enumerate(names)}
        begun = _begun(strategy, len(programs))
        self._server = DownpourServer(begun.server_param)
        told: Sequence[DownpourTrainerParameter | None] = begun.trainer_param or [None]
        told = list(told) * (len(programs) if len(told) == 1 else 1)
        self._workers = {
            id(program): DownpourWorker(window, begun_with)
            for program, begun_with in zip(programs, told, strict=True)
        }
        self._configs: dict[str, dict[str, list[int]]] = {}
        self._next_dense = len(names)
        self._rows = {name: rule for p in programs for name, rule in p._fleet_rows.items()
                      if name in self.table_ids}  # fmt: skip
        for name, number in self.table_ids.items():
            said = strategy.get(name)
            if name in self._rows:
                said = self._said_of_rows(name, {} if said is None else said)
            self._server.add_sparse_table(number, said)
        for program in programs:
            self._add_program(program)

    def _said_of_rows(self, name: str, said: Strategy) -> Strategy:
        """Options of a table in `fleet_embedding`; their width must be that of its layer."""
        check_type(said, f"the strategy of '{name}'", Mapping)
        width = next(p.global_block().var(name).shape[1] for p in self._programs
                     if name in self._tables[id(p)])  # fmt: skip
        counts = said.get("sparse_accessor_class", CTR[0]) != VALUE
        self._rows[name] = replace(self._rows[name], counts=counts)
        wanted = width - HEAD if counts else width
        if said.get("sparse_embedx_dim", wanted) != wanted:
            what = f"sparse_embedx_dim of '{name}' is {said['sparse_embedx_dim']}"
            hint = f"embedding size - {HEAD}" if counts else "the embedding's size"
            raise mistake(f"{what}, and its embedding has rows of {width}", f"{wanted}: {hint}")
        return {**said, "sparse_embedx_dim": wanted}

    def _add_program(self, program: Program) -> None:
        worker, numbers = self._workers[id(program)], []
        for name in self._tables[id(program)]:
            ids = find_distributed_lookup_table_inputs(program, name)
            rows = find_distributed_lookup_table_outputs(program, name)
            worker.add_sparse_table(self.table_ids[name], ids, rows)
            numbers.append(self.table_ids[name])
        worker.skip(SKIPPED)
        self._configs[str(id(program))] = {
            "pull_sparse": numbers,
            "push_sparse": list(numbers),
            "pull_dense": [],
            "push_dense": [],
        }

    def add_loss(self, program: Program, pairs: Pairs) -> None:
        """Adds the dense tables of one loss: its parameters, and data_norm's counts if any."""
        ordinary, counted = split_pairs(pairs, self.table_ids)
        said = self._strategy.get("dense_table")
        params, grads = [p for p, _ in ordinary], [g for _, g in ordinary]
        self._server.add_dense_table(self._next_dense, params, grads, said)
        self._number(program, ordinary)
        if counted:
            said = self._strategy.get("datanorm_table")
            params, grads = [p for p, _ in counted], [g for _, g in counted]
            self._server.add_data_norm_table(self._next_dense, 0.0, params, grads, said)
            self._number(program, counted)

    def _number(self, program: Program, pairs: Pairs) -> None:
        """Assigns a program the next dense table."""
        self._workers[id(program)].add_dense_table(self._next_dense, pairs)
        config = self._configs[str(id(program))]
        config["pull_dense"].append(self._next_dense)
        config["push_dense"].append(self._next_dense)
        self._next_dense += 1

    def opt_info(self) -> dict[str, Any]:
        workers = {str(id(p)): self._workers[id(p)].get_desc() for p in self._programs}
        desc = PSParameter(
            server_param=self._server.get_desc(), trainer_param=tuple(workers.values())
        )
        options = {k: copy.copy(self._strategy.get(k, v)) for k, v in _OPTIONS.items()}
        worker = "Hogwild" if self._rows else "DownpourSGD"
        return {
            **({FLEET_ROWS: self._rows} if self._rows else {}),
            "program_id_to_worker": workers,
            "program_configs": self._configs,
            "trainer": self._strategy.get("trainer", "DistMultiTrainer"),
            "device_worker": self._strategy.get("device_worker", worker),
            "optimizer": "DownpourSGD",
            "fleet_desc": desc,
            "worker_skipped_ops": list(SKIPPED),
            **options,
            **_by_accessor(desc),
        }


class DownpourOptimizer:
    """The optimizer that pslib's fleet wraps around the script's.

    Args:
        optimizer: Adam; for another one a message states that servers use their own.
        strategy: see `DistributedAdam.minimize`.
        worker_index: of this worker, `mpi_rank` in `_fleet_opt`.
        worker_num: the number of workers, `mpi_size` in `_fleet_opt`.
        told: called with the programs that `minimize` describes.

    Raises:
        TypeError: the strategy is not a mapping.
    """

    def __init__(
        self,
        optimizer: Any,
        strategy: Strategy | None = None,
        *,
        worker_index: int = 0,
        worker_num: int = 1,
        told: Callable[[list[Program]], None] = lambda _: None,
    ) -> None:
        check_type(strategy, "a strategy", (Mapping, type(None)))
        check_type(optimizer, "an optimizer", Optimizer)
        self._optimizer, self._strategy = optimizer, dict(strategy or {})
        self._place, self._told = (worker_index, worker_num), told
        self._window = 1
        self.type = "downpour"
        if not isinstance(optimizer, AdamOptimizer):
            name = type(optimizer).__name__
            text = f"Currently, distributed optimizer only support Adam: {name} is not used"
            print(text)  # noqa: T201  # as fluid does
        self._distributed_optimizer = DistributedAdam(optimizer)

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses: gradients and updates cannot be separated here."""
        del args, kwargs
        raise UnsupportedError("a Downpour optimizer has no backward", hint="call minimize")

    def apply_gradients(self, params_grads: Any) -> Any:
        """Refuses: servers apply the updates."""
        del params_grads
        raise UnsupportedError("a Downpour optimizer has no apply_gradients", hint="call minimize")

    def minimize(
        self,
        losses: Variable | Sequence[Variable],
        scopes: Any = None,
        startup_programs: Program | Sequence[Program] | None = None,
        parameter_list: Sequence[Parameter | str] | None = None,
        no_grad_set: Collection[str | Variable] | None = None,
    ) -> list[Any]:
        """Adds gradients, and describes the job in every program's `_fleet_opt`.

        Args:
            losses: one, or a list.
            scopes: scopes of the parameters, one per loss; the global scope unless given.
            startup_programs: initialize the parameters, one per loss.
            parameter_list: parameters to differentiate; all trained ones unless given.
            no_grad_set: variables at which gradients stop.

        Returns:
            No operators, and the (parameter, gradient) pairs of each loss.

        Raises:
            ValueError: the numbers of scopes and losses differ, or the strategy is invalid.
        """
        many: list[Any] = list(losses) if isinstance(losses, list | tuple) else [losses]
        if not many:
            raise mistake("there is no loss", _LOSSES_HINT)
        for loss in many:
            check_type(loss, "a loss", Variable, _LOSSES_HINT)
        held = [global_scope()] * len(many) if scopes is None else _listed(scopes)
        if len(held) != len(many):
            what = "You should make sure len(scopes) == len(programs) or set scopes None"
            raise mistake(what, f"there are {len(held)} scopes, and {len(many)} losses")
        startups = None if startup_programs is None else _listed(startup_programs)
        made, pairs, opt_info = self._distributed_optimizer.minimize(
            many, startups, parameter_list, no_grad_set, self._strategy
        )
        opt_info["mpi_rank"], opt_info["mpi_size"] = self._place
        for loss in many:
            loss.block.program._fleet_opt = opt_info
        self._told(_programs(many))
        return [made, pairs]


def _by_accessor(desc: PSParameter) -> dict[str, Any]:
    """The options that depend on the accessor of table 0."""
    table = next((table for table in desc.tables if table.table_id == 0), None)
    accessor = table and table.accessor and table.accessor.accessor_class
    if accessor in DUMPED:
        return {"dump_slot": True}
    return {"no_cvm": True} if accessor == VALUE else {}


def _programs(losses: Sequence[Variable]) -> list[Program]:
    return list({id(loss.block.program): loss.block.program for loss in losses}.values())


def _tables_of(program: Program) -> list[str]:
    """The distributed tables of a program, in look-up order."""
    ops = program.global_block().ops
    spread = [op for op in ops if op.type in LOOKUPS and op.attr("is_distributed")]
    return list(dict.fromkeys(op.input("W")[0] for op in spread))


def _begun(strategy: Strategy, programs: int) -> PSParameter:
    """Reads a strategy's `fleet_desc_file`, if any; it must describe this many programs."""
    begun = from_file(strategy, PSParameter)
    count = len(begun.trainer_param)
    if count not in {0, 1, programs}:
        raise mistake(f"trainer param size != program size, {count} vs {programs}",
                      str(strategy.get("fleet_desc_file")))  # fmt: skip
    return begun


def _listed(given: Any) -> list[Any]:
    return list(given) if isinstance(given, list | tuple) else [given]
