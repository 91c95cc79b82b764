"""The program of a worker: without its distributed lookups, whose rows are fed.

::

    rows = lookup_table(ids, emb)                   (fed)
    ...                                             ...
    emb@GRAD = lookup_table_grad(ids, rows@GRAD)    (rows@GRAD is fetched)

So the table never exists as an array, nor does its gradient.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from jaxfleet.analysis.updates import LOOKUPS
from jaxfleet.contrib.downpour.descriptions import (
    DenseTableParameter,
    DownpourTrainerParameter,
    PSParameter,
)
from jaxfleet.contrib.downpour.messages import description_of
from jaxfleet.errors import ProgramError
from jaxfleet.fluid.framework.operator import Operator
from jaxfleet.fluid.framework.program import Program, VersionCache
from jaxfleet.fluid.framework.program_copy import copy_program, without_backward
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.layers.nn import FleetRows

CLICK = "click"  # default variable that marks clicked samples
COUNTS = 2  # columns of a row for shows and clicks
FLEET_ROWS = "fleet_embedding"  # key of `_fleet_opt` with the usage of tables
_GRADS = frozenset(f"{op_type}_grad" for op_type in LOOKUPS)


@dataclass(frozen=True)
class LookUp:
    """One look-up of a sparse table."""

    table_id: int  # pslib's number of the table
    table: str  # its parameter's name
    width: int  # elements of a row, as the program sees it
    ids: str  # variable of the ids
    rows: str  # variable of the rows
    ids_end: bool  # the last axis of the ids, of size 1, becomes the row (`lookup_table`)
    padding: int | None  # the id whose row is zero; None without one
    grads: tuple[str, ...]  # gradients of the rows, one for each loss that depends on them
    shows: bool  # rows begin with the untrained shows and clicks of their key
    click: str = CLICK  # variable that marks clicked samples
    scales: bool = False  # multiply gradients by the number of samples of the batch

    @property
    def trained(self) -> int:
        """Number of trained elements of a row."""
        return self.width - COUNTS if self.shows else self.width


@dataclass(frozen=True)
class WorkerProgram:
    """A worker's share of a program.

    Attributes:
        program: without the skipped operators.
        look_ups: the look-ups whose rows are fed instead.
        dense: the dense tables whose parameters are pulled, and pushed in training.
        read: names that its operators read.
    """

    program: Program
    look_ups: tuple[LookUp, ...]
    dense: tuple[DenseTableParameter, ...]
    read: frozenset[str]


def worker_program(program: Program, *, is_trained: bool) -> WorkerProgram:
    """Derives a worker's program from one that `minimize` described.

    The result is cached while the program and its description are unchanged. With `is_trained` it
    includes backward.

    Raises:
        ProgramError: the program does not match its description.
    """
    known, opt_info = _MADE.get(program), program._fleet_opt
    if is_trained not in known or known[is_trained][0] is not opt_info:
        known[is_trained] = opt_info, _made(program, is_trained=is_trained)
    return known[is_trained][1]


_MADE: VersionCache[dict[bool, tuple[Any, WorkerProgram]]] = VersionCache(lambda _: {})


def _made(program: Program, *, is_trained: bool) -> WorkerProgram:
    opt_info: Mapping[str, Any] = program._fleet_opt
    trainer = _trainer(opt_info, program)
    sparse = {name: one.table_id for one in trainer.sparse_table for name in one.slot_value}
    root = program.global_block()
    found = [op for op in root.ops if op.type in LOOKUPS and op.output("Out")[0] in sparse]
    tables = {op.input("W")[0] for op in found}
    back = [op for op in root.ops if op.type in _GRADS and op.input("W")[0] in tables]
    made, skipped = copy_program(program), {id(op) for op in _skipped(root.ops, [*found, *back])}
    block = made.global_block()
    kept = zip(block.ops, root.ops, strict=True)
    block.ops = [op for op, old in kept if id(old) not in skipped]
    made.version += 1
    if not is_trained:
        without_backward(made)
        back = []
    read = frozenset(name for op in made.global_block().ops for name in op.input_arg_names)
    look_ups = tuple(
        _look_up(op, int(sparse[op.output("Out")[0]] or 0), back, opt_info) for op in found
    )
    dense = _dense(opt_info, trainer, program)
    _check_each_once(dense)
    return WorkerProgram(made, look_ups, dense, read)


def _check_each_once(dense: Iterable[DenseTableParameter]) -> None:
    """Checks that no parameter is in two tables of a program, whose values could differ."""
    homes: dict[str, int | None] = {}
    for table in dense:
        for name in table.dense_variable_name:
            if name in homes:
                what = f"'{name}' is in the dense tables {homes[name]} and {table.table_id}"
                hint = "losses of one program that share parameters are one loss: add them up"
                raise ProgramError(what, hint=hint)
            homes[name] = table.table_id


def _look_up(
    op: Operator, table_id: int, back: Iterable[Operator], opt_info: Mapping[str, Any]
) -> LookUp:
    (table,), (ids,), (rows,) = op.input("W"), op.input("Ids"), op.output("Out")
    grads = [
        g.input("Out@GRAD")[0]
        for g in back
        if g.input("W") == [table] and g.input("Ids") == [ids] and _is_of(g, op)
    ]
    padding = op.attr("padding_idx")
    of_fleet = opt_info.get(FLEET_ROWS, {}).get(table)
    if of_fleet is None:
        of_fleet = FleetRows(CLICK, False, counts=bool(opt_info.get("use_cvm")))
    return LookUp(
        table_id,
        table,
        op.block._var_recursive(table).shape[1],
        ids,
        rows,
        op.type == "lookup_table",
        None if padding is None or padding < 0 else int(padding),
        tuple(dict.fromkeys(grads)),
        of_fleet.counts,
        of_fleet.click_name,
        of_fleet.scale_sparse_grad,
    )


def _is_of(grad: Operator, op: Operator) -> bool:
    """Whether a gradient operator belongs to `op`: it reads its output's gradient."""
    return grad.input("Out@GRAD")[0].startswith(f"{op.output('Out')[0]}@GRAD")


def _skipped(ops: Iterable[Operator], begin: list[Operator]) -> list[Operator]:
    """Look-ups, their gradient operators, and the sums that only consume these."""
    skipped = list(begin)
    gone = {name for op in begin if op.type in _GRADS for name in op.output_arg_names}
    for op in ops:
        if not gone.isdisjoint(op.input_arg_names):
            skipped.append(op)
            gone.update(op.output_arg_names)
    return skipped


def _trainer(opt_info: Mapping[str, Any], program: Program) -> DownpourTrainerParameter:
    workers = opt_info.get("program_id_to_worker", {})
    if str(id(program)) in workers:
        found = workers[str(id(program))]
        told = found if isinstance(found, DownpourTrainerParameter) else found.get_desc()
        return cast("DownpourTrainerParameter", description_of(told))
    desc = description_of(opt_info["fleet_desc"])
    if not isinstance(desc, PSParameter) or not desc.trainer_param:
        raise ProgramError(
            "the program's _fleet_opt has no settings for workers", hint="minimize does"
        )
    rows = {name for block in program.blocks for name in block.vars}
    for trainer in desc.trainer_param:
        if all(name in rows for one in trainer.sparse_table for name in one.slot_value):
            return trainer
    return desc.trainer_param[0]


def _dense(
    opt_info: Mapping[str, Any], trainer: DownpourTrainerParameter, program: Program
) -> tuple[DenseTableParameter, ...]:
    """The tables in the program's own config; for a copy, those it declares."""
    config = opt_info.get("program_configs", {}).get(str(id(program)))
    if config is not None:
        return tuple(one for one in trainer.dense_table if one.table_id in config["pull_dense"])
    declared = program.global_block().vars
    return tuple(
        one for one in trainer.dense_table if all(n in declared for n in one.dense_variable_name)
    )


def declared(program: Program, name: str) -> Variable:
    """A variable of block 0, which must be declared."""
    return program.global_block()._var_recursive(name)
