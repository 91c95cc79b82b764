"""Attributes of a transpiler that scripts read after `transpile`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxfleet.analysis.placement.sliced_layout import Slice, placement_of, slices_of
from jaxfleet.analysis.updates import LOOKUPS, Updates
from jaxfleet.fluid.framework.operator import ROLE_VAR, Operator
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.transpiler.details.vars_distributed import VarsDistributed
from jaxfleet.fluid.transpiler.pserver_job import PServerJob
from jaxfleet.ir import block_name, trainer_name
from jaxfleet.ir.naming import LR_COUNTER

_PREFETCHES = (*sorted(LOOKUPS), "nce")


class JobAttributes:
    """The attributes of a transpiler; those of a job with servers are set once it has run."""

    # the step counter of trainers for servers that cannot count; None if not needed
    counter_var: Variable | None = None
    origin_program: Program  # the program that was transpiled
    startup_program: Program  # its startup program, transpiled
    origin_startup_program: Program  # its startup program before
    trainer_num: int  # the number of trainers
    trainer_id: int  # the number of this trainer
    sync_mode: bool  # whether servers wait for all trainers
    pserver_endpoints: list[str]  # the endpoints of the servers
    vars_overview: VarsDistributed  # the variables on servers
    optimize_ops: list[Operator]  # the original operators that update
    params_grads: list[list[Variable]]  # each parameter with its gradient
    table_name: str | None  # the distributed table, or None
    has_distributed_lookup_table: bool  # whether there is a distributed table
    param_name_to_grad_name: dict[str, str]  # names of gradients by the names of their parameters
    grad_name_to_param_name: dict[str, str]  # the inverse
    sparse_update_ops: list[Operator]  # lookups of rows on servers that no operator has replaced
    # rows of each slice of tables that trainers never hold
    sparse_param_to_height_sections: dict[str, list[int]]
    need_delete_optimize_vars: list[str]  # inputs of updates besides parameters and gradients
    param_var_mapping: dict[str, list[Variable]]  # the slices of each parameter
    # the slices of each gradient, as this trainer sends them
    grad_var_mapping: dict[str, list[Variable]]
    # the slice of a parameter by the slice of its gradient
    grad_param_mapping: dict[Variable, Variable]
    # the slices of parameters and gradients by endpoint
    param_grad_ep_mapping: dict[str, dict[str, list[Variable]]]
    # the control variable of each gradient's `send`
    grad_name_to_send_dummy_out: dict[str, Variable]

    def _describe(self, job: PServerJob, main: Program, trainer_id: int, table: str | None) -> None:
        """Sets all attributes except the programs, for a trainer's transpiled program."""
        found = _Described(job, main, trainer_id)
        self.trainer_num, self.trainer_id = job.trainers, trainer_id
        self.sync_mode, self.pserver_endpoints = job.is_sync, list(job.endpoints)
        self.optimize_ops, self.params_grads = found.optimize_ops, found.params_grads
        self.table_name, self.has_distributed_lookup_table = table, table is not None
        pairs = found.updates.all_pairs
        self.param_name_to_grad_name = dict(pairs)
        self.grad_name_to_param_name = {gradient: param for param, gradient in pairs}
        self.sparse_update_ops = found.sparse_update_ops
        self.sparse_param_to_height_sections = found.sections
        self.need_delete_optimize_vars = found.state_of_updates
        self.param_var_mapping, self.grad_var_mapping = found.param_slices, found.grad_slices
        self.grad_param_mapping = dict(found.pairs_of_slices())
        self.param_grad_ep_mapping = found.by_endpoint()
        self.grad_name_to_send_dummy_out = found.controls(self.param_name_to_grad_name)
        self.counter_var = main.global_block().vars.get(trainer_name(LR_COUNTER, trainer_id))


@dataclass(frozen=True)
class _Described:
    """Computes the attributes of a job for the transpiled program `main` of one trainer."""

    job: PServerJob
    main: Program
    trainer_id: int

    @cached_property
    def updates(self) -> Updates:
        return Updates(self.job.placed)

    @property
    def optimize_ops(self) -> list[Operator]:
        return [op for op in self.job.main.global_block().ops if op._is_optimize_op()]

    @property
    def params_grads(self) -> list[list[Variable]]:
        return [[self._variable(p), self._variable(g)] for p, g in self.updates.all_pairs]

    @property
    def state_of_updates(self) -> list[str]:
        named = {name for op in self.optimize_ops for name in op.attr(ROLE_VAR) or ()}
        read = [name for op in self.optimize_ops for name in op.input_arg_names]
        return [name for name in dict.fromkeys(read) if name not in named]

    @property
    def sparse_update_ops(self) -> list[Operator]:
        ops = self.main.global_block().ops
        return [op for op in ops if op.type in _PREFETCHES and op.attr("remote_prefetch")]

    @property
    def sections(self) -> dict[str, list[int]]:
        tables = self.updates.prefetched
        return {p: [cut.rows for cut in cuts] for p, cuts in self._cuts.items() if p in tables}

    @cached_property
    def _cuts(self) -> dict[str, list[Slice]]:
        found: dict[str, list[Slice]] = {}
        for cut in slices_of(self.job.placed):
            found.setdefault(cut.param, []).append(cut)
        return found

    @cached_property
    def param_slices(self) -> dict[str, list[Variable]]:
        return {
            param: [self._slice(param, cut.name, cut) for cut in cuts]
            for param, cuts in self._cuts.items()
        }

    @cached_property
    def grad_slices(self) -> dict[str, list[Variable]]:
        gradients = dict(self.updates.all_pairs)
        return {
            gradients[param]: [self._slice(gradients[param], self._sent(cut), cut) for cut in cuts]
            for param, cuts in self._cuts.items()
        }

    def _sent(self, cut: Slice) -> str:
        """Returns the name under which this trainer sends the slice of a gradient."""
        gradient = dict(self.updates.all_pairs)[cut.param]
        name = gradient if cut.is_whole else block_name(gradient, cut.index)
        is_own = self.job.is_sync and self.job.trainers > 1
        return trainer_name(name, self.trainer_id) if is_own else name

    def _slice(self, whole: str, name: str, cut: Slice) -> Variable:
        known = self.main.global_block().vars.get(name)
        return known if known is not None else self._like(whole, name, cut.shape)

    def _like(self, whole: str, name: str, shape: Sequence[int]) -> Variable:
        """Returns a variable that no operator names: the communication layer cuts it."""
        of, block = self._variable(whole), self.main.global_block()
        return Variable(block, name=name, shape=list(shape), dtype=of.dtype, type=of.type)

    def _variable(self, name: str) -> Variable:
        known = self.main.global_block().vars.get(name)
        return known if known is not None else self.job.main.global_block().var(name)

    def pairs_of_slices(self) -> Iterator[tuple[Variable, Variable]]:
        """Yields each slice of a gradient with the slice of its parameter."""
        for gradient, param in zip(
            self.grad_slices.values(), self.param_slices.values(), strict=True
        ):
            yield from zip(gradient, param, strict=True)

    def by_endpoint(self) -> dict[str, dict[str, list[Variable]]]:
        """Returns the slices by endpoint."""
        found: dict[str, dict[str, list[Variable]]]
        found = {at: {"params": [], "grads": []} for at in self.job.endpoints}
        placement = placement_of(self.job.placed)
        for gradient, param in self.pairs_of_slices():
            found[placement[param.name]]["params"].append(param)
            found[placement[param.name]]["grads"].append(gradient)
        return found

    def controls(self, gradients: dict[str, str]) -> dict[str, Variable]:
        """Returns the control variable of each gradient's `send`."""
        block, found = self.main.global_block(), dict[str, Any]()
        for op in block.ops:
            named, out = op.attr(ROLE_VAR) or (), op.output("Out")
            if op.type == "send" and named and named[0] in gradients and out:
                found[gradients[named[0]]] = block.vars[out[0]]
        return found
