"""Normalization of transpiled programs from fluid's dialect to the dialect of `jaxfleet.ps`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxfleet.analysis.memory.final_variables import final_variables
from jaxfleet.errors import FeedError
from jaxfleet.fluid.lowering.memory import with_recomputation
from jaxfleet.fluid.pserver.async_normalization import (
    unsummed_gradients,
    with_parts,
    with_trainer_sums,
)
from jaxfleet.fluid.pserver.row_programs import SEND_ROWS, RowTable, distributed_tables, with_rows
from jaxfleet.ir import Block, BlockRef, Kind, Operands, Operator, Program, Role, Variable
from jaxfleet.ir.naming import trainer_of
from jaxfleet.passes import MergeSends, ScheduleSends

_BARRIERS = frozenset({"send_barrier", "fetch_barrier"})
_WAITING = frozenset({*_BARRIERS, "recv", "fetch"})


@dataclass(frozen=True)
class TrainerProgram:
    """A trainer's program."""

    program: Program  # the program; an operator at its end marks the results of a run
    wanted: tuple[str, ...]  # the names that it marks: fetched and persistable variables
    fetched: tuple[str, ...]  # the fetched names among them, in order
    outliving: tuple[str, ...]  # the variables that the run leaves in the scope
    is_step: bool  # it sends gradients
    tables: tuple[RowTable, ...] = ()  # tables of which the rows of a batch are fed


def normalize_trainer(program: Program, fetch: Sequence[str]) -> TrainerProgram:
    """Returns a trainer's program in the dialect of `jaxfleet.ps`.

    Sends move to the end of the computation, where one message combines several of them. Raises
    FeedError if a fetched variable does not exist, or no longer exists at the end.
    """
    fetch = final_variables(program, fetch)
    for name in fetch:
        if name not in program.variables and name not in program.root.variables:
            what = f"'{name}' is fetched, but the trainer's program has no such variable"
            raise FeedError(what, hint="what only servers have, trainers cannot fetch")
    program, tables = with_rows(with_parts(program))
    for name in {table.name for table in tables}.intersection(fetch):
        what = f"'{name}' is fetched, and trainers have only the rows that they look up"
        raise FeedError(what, hint="fluid.io.save_persistables saves what servers hold")
    received: set[str] = set()
    ops = [_plain(op, received) for op in program.root.ops]
    made = program.with_block(program.root.with_ops(ops))
    written = {name for block in made.blocks for op in block.ops for name in op.writes}
    kept = [v.name for v in made.of_kind(Kind.PARAM, Kind.STATE) if v.name in written]
    wanted = tuple(dict.fromkeys((*fetch, *kept)))
    made = made.with_block(made.root.with_ops([*ops, Operator("fetch", Operands.of(*wanted))]))
    made = _without_unused(made)
    is_step = any(op.type in {"send", SEND_ROWS} for op in ops)
    made = with_recomputation(_with_sends_together(made), ()) if is_step else made
    return TrainerProgram(made, wanted, fetch, tuple(kept), is_step, tables)


def _with_sends_together(program: Program) -> Program:
    """Moves all sends, including those of rows, to the end of the computation."""
    rows = [op for op in program.root.ops if op.type == SEND_ROWS]
    rest = program.root.with_ops([op for op in program.root.ops if op.type != SEND_ROWS])
    made = MergeSends().run(ScheduleSends().run(program.with_block(rest)))
    ops = list(made.root.ops)
    needed = {name for op in rows for name in op.reads}
    ready = max((at for at, op in enumerate(ops) if not needed.isdisjoint(op.writes)), default=-1)
    waits = (at for at, op in enumerate(ops) if at > ready and op.type in _WAITING)
    ops[(at := next(waits, len(ops))) : at] = rows
    return made.with_block(made.root.with_ops(ops))


def _plain(op: Operator, received: set[str]) -> Operator:
    """Returns an operator without control variables; records the variables from servers."""
    if op.type == "send":
        return replace(op, outputs=Operands())
    if op.type in _BARRIERS:
        return replace(op, inputs=Operands(), outputs=Operands())
    if op.type == "recv":
        received.update(op.writes)
        return replace(op, inputs=Operands())
    if op.type == "concat" and op.reads and received.issuperset(op.reads):
        return replace(op, role=Role.DIST)
    return op


def _without_unused(program: Program) -> Program:
    used = {
        name for block in program.blocks for op in block.ops for name in (*op.reads, *op.writes)
    }
    variables = {name: v for name, v in program.variables.items() if name in used}
    root = {name: v for name, v in program.root.variables.items() if name in used}
    made = program.with_block(replace(program.root, variables=root))
    return replace(made, variables=variables)


@dataclass(frozen=True)
class ServerInputs:
    """The external inputs of a server's blocks."""

    state: frozenset[str]  # variables with values from the last step, or from the startup program
    buffers: frozenset[str]  # values from trainers, by the name at each sender


def server_inputs(program: Program) -> ServerInputs:
    """Returns the inputs that a server's blocks, run in order, read before writing them."""
    needed: dict[str, None] = {}
    buffers = set(unsummed_gradients(program))
    written: set[str] = set()
    for index in served_blocks(program):
        for op in program.blocks[index].ops:
            if op.type == "sum" and op.reads and all(trainer_of(n) is not None for n in op.reads):
                buffers.update(op.reads)
            inner = list(_within(program, op.blocks))
            needed.update(dict.fromkeys(n for n in op.reads if n not in written))
            # A sub-block may not run, so its outputs may keep their old values.
            used = (name for o in inner for name in (*o.reads, *o.writes))
            own = {name for i in op.blocks for name in program.blocks[i].variables}
            needed.update(dict.fromkeys(n for n in used if n not in written and n not in own))
            written.update(op.writes)
    return ServerInputs(frozenset(needed) - buffers, frozenset(buffers))


def served_blocks(program: Program) -> list[int]:
    """Returns the blocks that `listen_and_serv` runs, in order."""
    refs = program.root.ops[0].attrs.get("optimize_blocks", ())
    assert isinstance(refs, tuple)
    return [ref.index for ref in refs if isinstance(ref, BlockRef)]


def normalize_server(program: Program) -> Program:
    """Returns a server's program whose state is only what one step leaves to the next.

    Values from trainers are data. Everything else is a temporary of the one block that uses it, or
    of block 0; fluid's declaration of it, such as a whole parameter's shape for a slice's decay, is
    then ignored.
    """
    program = with_trainer_sums(_with_sums_apart(without_tables(program)))
    needs, users = server_inputs(program), _users(program)
    made = {name for index in served_blocks(program) for op in program.blocks[index].ops
            for name in op.writes}  # fmt: skip
    # An average of parameters does not read an earlier value, and is state nevertheless.
    kept = needs.state | {v.name for v in program.of_kind(Kind.PARAM) if v.name in made}
    top: dict[str, Variable] = {}
    moved: dict[int, dict[str, Variable]] = {}
    for name, variable in {**program.variables, **program.root.variables}.items():
        if name in needs.buffers:
            top[name] = replace(variable, kind=Kind.DATA)
        elif name in kept or variable.kind is Kind.CONST:
            top[name] = variable
        elif name in users:
            home = users[name][0] if len(users[name]) == 1 else 0
            moved.setdefault(home, {})[name] = replace(variable, kind=Kind.TEMP)
    (serve,) = program.root.ops
    sent = Operands.named(X=[name for name in top if name in needs.buffers])
    blocks = [_block(block, moved.get(block.index, {})) for block in program.blocks]
    serve = replace(serve, type="listen_and_serv", inputs=sent)
    blocks[0] = replace(blocks[0], ops=(serve,), variables=moved.get(0, {}))
    return replace(program, variables=top, blocks=tuple(blocks))


def without_tables(program: Program) -> Program:
    """Returns a server's program with its distributed tables as facts instead of blocks.

    `jaxfleet.tables` looks up and updates their rows.
    """
    specs = distributed_tables(program)
    if not specs:
        return program
    names = {spec.name for spec in specs}
    (serve,) = program.root.ops
    of_tables = {
        block.index
        for block in program.blocks[1:]
        if any(not names.isdisjoint((*op.reads, *op.writes)) for op in block.ops)
    }
    kept = tuple(BlockRef(index) for index in served_blocks(program) if index not in of_tables)
    pairs = serve.attrs.get("grad_to_block_id", ())
    assert isinstance(pairs, tuple)
    mine = tuple(pair for pair in pairs if int(str(pair).rpartition(":")[2]) not in of_tables)
    attrs = serve.attrs.updated(optimize_blocks=kept, grad_to_block_id=mine)
    root = program.root.with_ops([replace(serve, attrs=attrs)])
    rest = [
        replace(block, ops=(), variables={}) if block.index in of_tables else block
        for block in program.blocks[1:]
    ]
    texts = tuple(spec.to_text() for spec in specs)
    made = replace(program, attrs=program.attrs.updated(tables=texts))
    return made.with_blocks([root, *rest])


def _with_sums_apart(program: Program) -> Program:
    """Returns a server's program that names sums of parameters as in messages.

    When trainers' parameters are averaged, fluid writes their sum to the parameter itself.
    """
    blocks = [replace(block, ops=tuple(_sums_apart(block.ops))) for block in program.blocks]
    made = program.with_blocks(blocks)
    names = {n: op for block in blocks for op in block.ops for n in op.writes}
    new = {n: op for n, op in names.items() if n not in program.variables and op.type == "sum"}
    known = program.root.variables
    added = {
        name: replace(program.variables[op.reads[0]], name=name, kind=Kind.TEMP)
        for name, op in new.items()
        if name not in known
    }
    return replace(made, variables={**made.variables, **added})


def _sums_apart(ops: Sequence[Operator]) -> Iterator[Operator]:
    names: dict[str, str] = {}
    for op in ops:
        summand = trainer_of(op.reads[0]) if op.type == "sum" and op.reads else None
        if summand is not None and (apart := op.reads[0].rpartition(".")[0]) != op.writes[0]:
            names[op.writes[0]] = apart
            yield replace(op, outputs=op.outputs.renamed(names))
        else:
            yield replace(op, inputs=op.inputs.renamed(names))


def _block(block: Block, more: Mapping[str, Variable]) -> Block:
    # Servers lack the whole parameters that operators name as their role variables.
    ops = (replace(op, role_var=()) for op in block.ops)
    return replace(block, ops=tuple(ops), variables={**block.variables, **more})


def _users(program: Program) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index in served_blocks(program):
        ops = [*program.blocks[index].ops]
        ops += _within(program, [number for op in ops for number in op.blocks])
        for name in dict.fromkeys(n for op in ops for n in (*op.reads, *op.writes)):
            found.setdefault(name, []).append(index)
    return found


def _within(program: Program, indices: Iterable[int]) -> Iterator[Operator]:
    for index in indices:
        for op in program.blocks[index].ops:
            yield op
            yield from _within(program, op.blocks)
