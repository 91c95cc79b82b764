"""Loading of a server's program, from IR or from text sent by a trainer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from jaxfleet.errors import JaxfleetError, ProgramError
from jaxfleet.ir import Block, Kind, Operator, Program, Variable, parse, print_program, verify
from jaxfleet.ir.attributes import Attr, BlockRef
from jaxfleet.ir.naming import trainer_of
from jaxfleet.ir.serialization import with_values
from jaxfleet.lower import ExecutableCache, LoweredBlock, host_type, lower_block
from jaxfleet.ps.server.execution_plan import (
    BlockPlan,
    Exchange,
    Merge,
    RowBlock,
    ServerPlan,
    row_block,
)
from jaxfleet.ps.server.outbox import request_error
from jaxfleet.ps.server.staleness import UNBOUNDED
from jaxfleet.tables import TableSpec
from jaxfleet.transport.consistency import mask_endpoints
from jaxfleet.transport.messages import Tensor

_OPTIONS = {"staleness": UNBOUNDED, "compensation": 0.0}  # defaults of program attributes
_BACKUP = "ref_by_trainer_id"  # a parameter as received by the gradient's sender


def read_plan(program: Program, cache: ExecutableCache) -> ServerPlan:
    """Builds the plan of a server's program."""
    verify(program)
    serve = _serve(program)
    indices = _optimize_blocks(serve)
    server, endpoints = _number(program, "pserver_id"), _endpoints(program)
    waits = _waits(serve)
    if not waits:
        _refuse_exchanges(program, indices)
    heads = {index: _head(program.blocks[index]) for index in indices}
    alone = {} if waits else _alone(program, serve)
    bare = _without_fed(program, heads)
    by_rows = {index: _row_block(bare, index, serve, cache) for index in indices}
    donate = {variable.name for variable in program.of_kind(Kind.STATE)}
    donate |= {name for rows in by_rows.values() if rows is not None for name in rows.state}
    lowered = {index: lower_block(bare, index, donate=donate, cache=cache) for index in indices}
    exchange = None
    blocks: list[BlockPlan] = []
    for index in indices:
        sums = [op for op in heads[index] if op.type == "sum"]
        crossing = [op for op in heads[index] if op.type == "exchange"]
        if crossing:
            exchange = _exchange(crossing[0], server, endpoints)
        merges = tuple(_merge(program, program.blocks[index], op) for op in sums)
        merges += tuple(alone.get(index, ()))
        after = _after(index, blocks, lowered, crossing)
        backups = dict(_backups(program, program.blocks[index]))
        rows = by_rows[index] if len(merges) == 1 else None
        block = BlockPlan(index, merges, after, lowered[index], bool(crossing), backups, rows)
        blocks.append(block)
    known = {**program.root.variables, **program.variables, **bare.root.variables}
    trainers = _number(program, "trainers")
    tables = _tables(program)
    bound, factor = (program.attrs.get(name, x) for name, x in _OPTIONS.items())
    assert isinstance(bound, int)
    assert isinstance(factor, float)
    plan = ServerPlan(
        program,
        server,
        endpoints,
        trainers,
        tuple(blocks),
        exchange,
        known,
        tables,
        waits,
        bound,
        factor,
    )
    assert plan.types.keys() == known.keys()  # raises here if the host lacks a type
    return plan


def _serve(program: Program) -> Operator:
    ops = program.root.ops
    if len(ops) != 1 or ops[0].type != "listen_and_serv":
        what = f"block 0 of '{program.name}' is not one listen_and_serv"
        raise ProgramError(what, hint="send the server's program, not the trainer's")
    return ops[0]


def _waits(serve: Operator) -> bool:
    """Whether a step waits for all trainers: fluid's distributed mode 0."""
    return serve.attrs.get("distributed_mode", 0) == 0


def _refuse_exchanges(program: Program, indices: Sequence[int]) -> None:
    for index in indices:
        for op in program.blocks[index].ops:
            if op.type == "exchange":
                what = "servers exchange parts of a step, and do not wait for all trainers"
                raise ProgramError(what, op=op, hint="transpile with communication='sync'")


def _alone(program: Program, serve: Operator) -> dict[int, list[Merge]]:
    """Returns the separately applied gradients of each block, from `grad_to_block_id`."""
    trainers, found = tuple(range(_number(program, "trainers"))), dict[int, list[Merge]]()
    for pair in _items(serve.attrs.get("grad_to_block_id", ()), "grad_to_block_id"):
        name, _, number = str(pair).rpartition(":")
        block = program.blocks[int(number)]
        merge = Merge(name, trainers, host_type(program.lookup(name, block)), is_alone=True)
        found.setdefault(block.index, []).append(merge)
    return found


def _row_block(
    program: Program, index: int, serve: Operator, cache: ExecutableCache
) -> RowBlock | None:
    """Returns a block for some rows of a parameter with sparse gradients, if possible."""
    pairs = _items(serve.attrs.get("sparse_grad_to_param", ()), "sparse_grad_to_param")
    sparse = frozenset(str(pair).rpartition(":")[0] for pair in pairs)
    return row_block(program, index, sparse, cache)


def _backups(program: Program, block: Block) -> Iterator[tuple[str, str]]:
    """Yields the backup variable of a parameter as the sender received it, with the parameter."""
    pairs = _items(program.attrs.get("backups", ()), "backups")
    params = {str(copy): str(param) for param, copy in (_items(p, "backups") for p in pairs)}
    for op in block.ops:
        if op.type == _BACKUP:
            yield op.writes[0], params[op.inputs.slot("X")[0]]  # type: ignore[index]


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
        raise ProgramError(f"{name} is not a list, but {value!r}")
    return value


def _head(block: Block) -> tuple[Operator, ...]:
    """Returns the leading operators of received inputs: exchanges and merges."""
    count = 0
    for op in block.ops:
        merges = op.type == "sum" and all(trainer_of(name) is not None for name in op.reads)
        if op.type != "exchange" and not merges:
            break
        count += 1
    return block.ops[:count]


def _without_fed(program: Program, heads: Mapping[int, Sequence[Operator]]) -> Program:
    """Returns the program without operators whose outputs are inputs: exchanges and backups."""
    fed: dict[str, Variable] = {}
    blocks = list(program.blocks)
    for index, head in heads.items():
        block = blocks[index]
        outside = [op for op in head if op.type == "exchange"]
        outside += [op for op in block.ops if op.type == _BACKUP]
        came = {name: program.lookup(name, block) for op in outside for name in op.writes}
        own = {name: v for name, v in block.variables.items() if name not in came}
        ops = tuple(op for op in block.ops if op not in outside)
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
    """Returns the earlier blocks with a read-write or write-write dependency on this one."""
    reads = set(lowered[index].reads).union(*(op.reads for op in crossing))
    writes = set(lowered[index].writes)
    touched = reads | writes
    return frozenset(
        other.index
        for other in earlier
        if touched & set(other.lowered.writes) or writes & set(other.lowered.reads)
    )


def load_sent_program(text: str, constants: Iterable[Tensor], cache: ExecutableCache) -> ServerPlan:
    """Builds the plan of a program that a trainer sent."""
    program = parse_sent_program(text)
    try:
        return read_plan(_with_constants(program, constants), cache)
    except Exception as error:  # no program may end the server
        raise request_error("bad_message", error) from error


def parse_sent_program(text: str) -> Program:
    """Parses the text of a program."""
    try:
        return parse(text)
    except JaxfleetError as error:
        raise request_error("bad_message", error) from error


def is_same_program(text: str, plan: ServerPlan) -> bool:
    """Whether a program is that of a plan, regardless of the servers' endpoints."""
    program = parse_sent_program(text)
    endpoints = program.attrs.get("endpoints")
    given = [str(each) for each in endpoints] if isinstance(endpoints, tuple) else []
    mine = mask_endpoints(print_program(plan.program), plan.endpoints)
    return mask_endpoints(print_program(program), given) == mine


def _with_constants(program: Program, tensors: Iterable[Tensor]) -> Program:
    scopes = (program.variables, *(block.variables for block in program.blocks))
    values = {}
    for tensor in tensors:
        for scope in scopes:
            variable = scope.get(tensor.name)
            if variable is not None and variable.constant is not None:
                values[variable.constant.digest] = tensor.array
    return with_values(program, values)
