"""DownpourSGD: adds gradients to programs and describes the tables that servers update.

The paper is Dean et al., Large scale distributed deep networks, NIPS 2012, section 4.1. The return
value of `minimize` changed twice in fluid, and scripts of all three forms exist:

| call | returns |
| --- | --- |
| `minimize(loss)`, a Variable: the first form | `[ps_param, worker_skipped_ops]` |
| `minimize([loss, ...])`, a list: the released form | `(None, param_grads_list)` |
| `_minimize(loss or [loss, ...])` | `(None, param_grads, opt_info)`, of the first loss |

All of them store the job in `program._fleet_opt`, from which executors run the program.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxfleet.contrib.downpour.descriptions import (
    DownpourTrainerParameter,
    ProgramConfig,
    PSParameter,
)
from jaxfleet.contrib.downpour.messages import Message, description_of
from jaxfleet.contrib.downpour.node import (
    DATA_NORM,
    SKIPPED,
    DownpourServer,
    DownpourWorker,
    leave_out_of_startup,
    split_pairs,
)
from jaxfleet.contrib.downpour.text_format import from_file
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.backward import append_backward
from jaxfleet.fluid.distribute_lookup_table import (
    find_distributed_lookup_table,
    find_distributed_lookup_table_inputs,
    find_distributed_lookup_table_outputs,
)
from jaxfleet.fluid.framework.program import Program, default_startup_program
from jaxfleet.fluid.framework.variable import Pairs, Parameter, Variable

_SPARSE_TABLE = 0  # all distributed look-ups share one table


class DownpourSGD:
    """Trains with tables on servers: one of rows, and dense ones of all other parameters.

    Args:
        learning_rate: of the tables.
        window: number of batches whose gradients are pushed together.
    """

    def __init__(self, learning_rate: float = 0.001, window: int = 1) -> None:
        check_type(learning_rate, "a learning rate", (float, int))
        if not isinstance(window, int) or window < 1:
            raise mistake(
                f"window is {window!r}", "how many batches are pushed together: 1 or more"
            )
        self.learning_rate_, self.window_ = learning_rate, window
        self._learning_rate, self._window = learning_rate, window
        self.type = "downpour"
        self.data_norm_name = [*DATA_NORM, *(f"{name}@GRAD" for name in DATA_NORM)]

    def minimize(
        self,
        losses: Variable | Sequence[Variable],
        startup_program: Program | None = None,
        parameter_list: Sequence[Parameter | str] | None = None,
        no_grad_set: Collection[str | Variable] | None = None,
    ) -> list[Any] | tuple[None, list[Pairs]]:
        """Adds the gradients of one or several losses, and describes the tables.

        Args:
            losses: one, or a list of them.
            startup_program: initializes the parameters; the table is removed from it, since servers
                initialize rows. The default startup program unless given.
            parameter_list: parameters to differentiate; all trained ones unless given.
            no_grad_set: variables at which gradients stop.

        Returns:
            For a list, None and the (parameter, gradient) pairs of each loss, by name; for a single
            loss, as fluid's first form did, the job's description as a message and the types of the
            operators that workers skip.

        Raises:
            ValueError: an argument is not a loss, or the list is empty.
            RuntimeError: a program has several distributed tables.
        """
        if isinstance(losses, Variable):
            _, opt_info = self._described([losses], startup_program, parameter_list, no_grad_set)
            return [opt_info["fleet_desc"], opt_info["worker_skipped_ops"]]
        if not isinstance(losses, list) or not losses:
            what = f"losses is a list, such as [model.cost], and not {losses!r}"
            raise mistake(what, "one loss, or a list of them")
        pairs, _ = self._described(losses, startup_program, parameter_list, no_grad_set)
        return None, pairs

    def _minimize(
        self,
        losses: Variable | Sequence[Variable],
        startup_program: Program | None = None,
        parameter_list: Sequence[Parameter | str] | None = None,
        no_grad_set: Collection[str | Variable] | None = None,
        strategy: Mapping[str, Any] | None = None,
    ) -> tuple[None, Pairs, dict[str, Any]]:
        """`minimize` that returns the first loss's pairs, and `_fleet_opt` too.

        `fleet_desc_file` of the strategy names a description in text form, whose tables take
        precedence over those made here; `use_cvm` declares that rows begin with shows and clicks.

        Raises:
            ProgramError: the file cannot be read.
        """
        many = losses if isinstance(losses, list) else [losses]
        said = strategy or {}
        given = parameter_list, no_grad_set
        pairs, opt_info = self._described(
            many, startup_program, *given, from_file(said, PSParameter)
        )
        if "use_cvm" in said:
            opt_info["use_cvm"] = bool(said["use_cvm"])
        return None, pairs[0], opt_info

    def _described(
        self,
        losses: Sequence[Any],
        startup_program: Program | None,
        parameter_list: Sequence[Parameter | str] | None,
        no_grad_set: Collection[str | Variable] | None,
        begun: PSParameter | None = None,
    ) -> tuple[list[Pairs], dict[str, Any]]:
        check_type(startup_program, "startup_program", (Program, type(None)))
        for loss in losses:
            check_type(loss, "a loss", Variable)
        given = begun or PSParameter()
        tables = _Tables.of(losses[0].block.program, self.learning_rate_, self.window_, given)
        found = []
        for loss in losses:
            pairs = append_backward(loss, parameter_list, no_grad_set)
            found.append(sorted(pairs, key=lambda pair: pair[0].name))
            tables.add_program(loss.block.program, found[-1])
        opt_info = tables.opt_info()
        if tables.table is not None:
            leave_out_of_startup(startup_program or default_startup_program(), [tables.table])
        for loss in losses:
            loss.block.program._fleet_opt = opt_info
        return found, opt_info


@dataclass
class _Tables:
    """The tables of a job while losses are added; `table` names the distributed one, if any."""

    rate: float
    table: str | None
    server: DownpourServer
    worker: DownpourWorker
    configs: list[ProgramConfig]

    @classmethod
    def of(cls, program: Program, rate: float, window: int, begun: PSParameter) -> "_Tables":
        """Starts from a given description and the first program's sparse table, number 0."""
        table = find_distributed_lookup_table(program)
        made = cls(rate, table, DownpourServer(), DownpourWorker(window), [])
        if begun.server_param is not None:
            made.server.get_desc().CopyFrom(begun.server_param)
        if begun.trainer_param:
            made.worker.get_desc().CopyFrom(begun.trainer_param[0])
        if table is not None:
            ids = find_distributed_lookup_table_inputs(program, table)
            rows = find_distributed_lookup_table_outputs(program, table)
            made.server.add_sparse_table(_SPARSE_TABLE, rate, ids, rows)
            made.worker.add_sparse_table(_SPARSE_TABLE, rate, ids, rows)
        return made

    def add_program(self, program: Program, pairs: Pairs) -> None:
        """Adds the dense tables of one loss: its parameters, and data_norm's counts if any."""
        ordinary, counted = split_pairs(pairs, {self.table} if self.table else set())
        table_ids = [self._add_dense(ordinary, self.server.add_dense_table)]
        if counted:
            table_ids.append(self._add_dense(counted, self.server.add_data_norm_table))
        sparse = (_SPARSE_TABLE,) if self.table is not None else ()
        dense, name = tuple(table_ids), str(id(program))
        self.configs.append(ProgramConfig(name, sparse, dense, sparse, dense))

    def _add_dense(self, pairs: Pairs, add: Any) -> int:
        table_id = 1 + len(self.worker.get_desc().dense_table)
        params, grads = [param for param, _ in pairs], [grad for _, grad in pairs]
        add(table_id, self.rate, params, grads)
        self.worker.add_dense_table(table_id, self.rate, params, grads)
        return table_id

    def opt_info(self) -> dict[str, Any]:
        told: DownpourTrainerParameter = description_of(self.worker.get_desc())
        skipped = told.skip_op or SKIPPED
        trainer = replace(told, skip_op=skipped, program_config=tuple(self.configs))
        servers = description_of(self.server.get_desc())
        return {
            "program_configs": _by_program(self.configs),
            "trainer": "DistMultiTrainer",
            "device_worker": "DownpourSGD",
            "optimizer": "DownpourSGD",
            "fleet_desc": Message.of(PSParameter(server_param=servers, trainer_param=(trainer,))),
            "worker_skipped_ops": list(skipped),
        }


def _by_program(configs: Sequence[ProgramConfig]) -> dict[str, dict[str, list[int]]]:
    """The tables of each program, over all its losses."""
    found: dict[str, dict[str, list[int]]] = {}
    for config in configs:
        known = found.setdefault(str(config.program_id), {})
        for key, numbers in (
            ("pull_sparse", config.pull_sparse_table_id),
            ("push_sparse", config.push_sparse_table_id),
            ("pull_dense", config.pull_dense_table_id),
            ("push_dense", config.push_dense_table_id),
        ):
            known[key] = list(dict.fromkeys([*known.get(key, []), *numbers]))
    return found
