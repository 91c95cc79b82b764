"""Reads a server's program: its blocks, what each waits for, and what it makes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Block, Kind, Operator, Program, Variable, verify
from jaxfleet.ir.values import Attr, BlockRef
from jaxfleet.lower import ExecutableCache, HostType, LoweredBlock, host_type, lower_block

_TRAINER = ".trainer_"


@dataclass(frozen=True)
class Merge:
    """A gradient that trainers send and the server adds up.

    Attributes:
        name: as trainers send it.
        senders: the trainers that have a summand, in the order of addition.
        type: what each sends.
    """

    name: str
    senders: tuple[int, ...]
    type: HostType

    def summand(self, trainer: int) -> str:
        """Returns the variable that holds what a trainer sends."""
        return f"{self.name}{_TRAINER}{trainer}"

    @cached_property
    def summands(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(map(self.summand, self.senders))


@dataclass(frozen=True)
class Exchange:
    """What crosses from server to server within a step.

    Attributes:
        here: the variables that this server has for the others.
        there: the variables that come, with the number of the server that sends each.
        others: the numbers of the servers that take part, but for this one.
    """

    here: tuple[str, ...]
    there: Mapping[str, int]
    others: tuple[int, ...]


@dataclass(frozen=True)
class BlockPlan:
    """One block of the program.

    Attributes:
        index: the block's.
        merges: the gradients that it merges.
        after: the blocks that must have run in the same step.
        lowered: what runs then.
        exchanges: it begins with what other servers send.
    """

    index: int
    merges: tuple[Merge, ...]
    after: frozenset[int]
    lowered: LoweredBlock
    exchanges: bool


@dataclass(frozen=True)
class ServerPlan:
    """A server's program, ready to run.

    Attributes:
        program: as it was sent.
        server: the server's number.
        endpoints: of all servers, in order.
        trainers: how many there are.
        blocks: in the order they run in.
        exchange: what crosses from server to server, if anything does.
        known: all variables that outlive a block or that several blocks know.
    """

    program: Program
    server: int
    endpoints: tuple[str, ...]
    trainers: int
    blocks: tuple[BlockPlan, ...]
    exchange: Exchange | None
    known: Mapping[str, Variable]

    @cached_property
    def types(self) -> Mapping[str, HostType]:
        """What the variables are on the host."""
        return {name: host_type(variable) for name, variable in self.known.items()}

    @cached_property
    def state(self) -> Mapping[str, Variable]:
        """The variables that live across steps."""
        return {v.name: v for v in self.program.of_kind(Kind.PARAM, Kind.STATE)}

    @cached_property
    def merges(self) -> Mapping[str, Merge]:
        """All gradients, by name."""
        return {merge.name: merge for block in self.blocks for merge in block.merges}

    @cached_property
    def makers_of_merges(self) -> Mapping[str, int]:
        """The block that merges each gradient."""
        return {merge.name: block.index for block in self.blocks for merge in block.merges}

    @cached_property
    def by_index(self) -> Mapping[int, BlockPlan]:
        """The blocks by their indices."""
        return {block.index: block for block in self.blocks}

    @cached_property
    def makers(self) -> Mapping[str, int]:
        """The last block that changes each variable."""
        return {name: block.index for block in self.blocks for name in block.lowered.writes}

    @cached_property
    def donated(self) -> frozenset[str]:
        """The variables whose memory the next step takes."""
        return frozenset(name for block in self.blocks for name in block.lowered.donated)


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
    plan = ServerPlan(program, server, endpoints, trainers, tuple(blocks), exchange, known)
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


def _items(value: Attr, name: str) -> tuple[Attr, ...]:
    if not isinstance(value, tuple):
        raise ProgramError(f"{name} is no list, but {value!r}")
    return value


def _head(block: Block) -> tuple[Operator, ...]:
    """Returns the operators that take what comes, which stand first: exchanges and merges."""
    count = 0
    for op in block.ops:
        merges = op.type == "sum" and all(_sender(name) is not None for name in op.reads)
        if op.type != "exchange" and not merges:
            break
        count += 1
    return block.ops[:count]


def _sender(name: str) -> int | None:
    """Returns whose summand a variable is: 1 for `g.trainer_1`."""
    _, found, number = name.rpartition(_TRAINER)
    return int(number) if found and number.isdigit() else None


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
        number = _sender(name)
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
