"""Reads a server's program into a plan."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Block, Kind, Operator, Program, Variable, verify
from jaxfleet.ir.names import trainer_of
from jaxfleet.ir.values import Attr, BlockRef
from jaxfleet.lower import ExecutableCache, LoweredBlock, host_type, lower_block
from jaxfleet.ps.server.plan import BlockPlan, Exchange, Merge, ServerPlan
from jaxfleet.tables import TableSpec


def read_plan(program: Program, cache: ExecutableCache) -> ServerPlan:
    """Reads a server's program.

    Raises:
        ProgramError: it is none, or breaks a rule.
    """
    verify(program)
    serve = _serve(program)
    indices = _optimize_blocks(serve)
    server, endpoints = _number(program, "pserver_id"), _endpoints(program)
    heads = {index: _head(program.blocks[index]) for index in indices}
    bare = _without_exchanges(program, heads)
    donate = {variable.name for variable in program.of_kind(Kind.STATE)}
    lowered = {index: lower_block(bare, index, donate=donate, cache=cache) for index in indices}
    exchange = None
    blocks: list[BlockPlan] = []
    for index in indices:
        sums = [op for op in heads[index] if op.type == "sum"]
        crossing = [op for op in heads[index] if op.type == "exchange"]
        if crossing:
            exchange = _exchange(crossing[0], server, endpoints)
        merges = tuple(_merge(program, program.blocks[index], op) for op in sums)
        after = _after(index, blocks, lowered, crossing)
        blocks.append(BlockPlan(index, merges, after, lowered[index], bool(crossing)))
    known = {**program.root.variables, **program.variables, **bare.root.variables}
    trainers = _number(program, "trainers")
    tables = _tables(program)
    plan = ServerPlan(program, server, endpoints, trainers, tuple(blocks), exchange, known, tables)
    assert plan.types.keys() == known.keys()  # it says so here where the host has no such type
    return plan


def _serve(program: Program) -> Operator:
    ops = program.root.ops
    if len(ops) != 1 or ops[0].type != "listen_and_serv":
        what = f"block 0 of '{program.name}' is not one listen_and_serv"
        raise ProgramError(what, hint="send the server's program, not the trainer's")
    return ops[0]


def _optimize_blocks(serve: Operator) -> tuple[int, ...]:
    refs = _items(serve.attrs.get("optimize_blocks", ()), "optimize_blocks")
    return tuple(ref.index for ref in refs if isinstance(ref, BlockRef))


def _number(program: Program, name: str) -> int:
    value = program.attrs.get(name)
    if not isinstance(value, int):
        raise ProgramError(f"'{program.name}' does not say its {name}")
    return value


def _endpoints(program: Program) -> tuple[str, ...]:
    return tuple(map(str, _items(program.attrs.get("endpoints", ()), "endpoints")))


def _tables(program: Program) -> tuple[TableSpec, ...]:
    texts = _items(program.attrs.get("tables", ()), "tables")
    tables = tuple(TableSpec.from_text(str(text)) for text in texts)
    names = [table.name for table in tables]
    if len(set(names)) < len(names):
        raise ProgramError(f"two tables of '{program.name}' have one name: {', '.join(names)}")
    return tables


def _items(value: Attr, name: str) -> tuple[Attr, ...]:
    if not isinstance(value, tuple):
        raise ProgramError(f"{name} is no list, but {value!r}")
    return value


def _head(block: Block) -> tuple[Operator, ...]:
    """Returns the operators that take what comes, which stand first: exchanges and merges."""
    count = 0
    for op in block.ops:
        merges = op.type == "sum" and all(trainer_of(name) is not None for name in op.reads)
        if op.type != "exchange" and not merges:
            break
        count += 1
    return block.ops[:count]


def _without_exchanges(program: Program, heads: Mapping[int, Sequence[Operator]]) -> Program:
    """Returns the program without what comes from other servers; it comes from outside."""
    fed: dict[str, Variable] = {}
    blocks = list(program.blocks)
    for index, head in heads.items():
        block, crossing = blocks[index], [op for op in head if op.type == "exchange"]
        came = {name: program.lookup(name, block) for op in crossing for name in op.writes}
        own = {name: v for name, v in block.variables.items() if name not in came}
        ops = tuple(op for op in block.ops if op not in crossing)
        blocks[index] = replace(block, ops=ops, variables=own)
        fed.update(came)
    blocks[0] = replace(blocks[0], variables={**blocks[0].variables, **fed})
    return program.with_blocks(blocks)


def _merge(program: Program, block: Block, op: Operator) -> Merge:
    senders = tuple(_senders(op))
    (name,) = op.writes
    return Merge(name, senders, host_type(program.lookup(name, block)))


def _senders(op: Operator) -> Iterator[int]:
    for name in op.reads:
        number = trainer_of(name)
        assert number is not None
        yield number


def _exchange(op: Operator, server: int, endpoints: tuple[str, ...]) -> Exchange:
    sources = _items(op.attrs.get("epmap", ()), "epmap")
    sharers = _items(op.attrs.get("endpoints", endpoints), "endpoints")
    numbers = [endpoints.index(str(endpoint)) for endpoint in sources]
    others = tuple(endpoints.index(str(endpoint)) for endpoint in sharers)
    there = dict(zip(op.writes, numbers, strict=True))
    return Exchange(op.reads, there, tuple(number for number in others if number != server))


def _after(
    index: int,
    earlier: Sequence[BlockPlan],
    lowered: Mapping[int, LoweredBlock],
    crossing: Sequence[Operator],
) -> frozenset[int]:
    """Returns the earlier blocks that touch what this one changes, or change what it touches."""
    reads = set(lowered[index].reads).union(*(op.reads for op in crossing))
    writes = set(lowered[index].writes)
    touched = reads | writes
    return frozenset(
        other.index
        for other in earlier
        if touched & set(other.lowered.writes) or writes & set(other.lowered.reads)
    )
