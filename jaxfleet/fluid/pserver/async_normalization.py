"""Normalization of asynchronous programs, and of messages that split and concatenate.

A trainer's `send` with `send_varnames` splits its variable, and a `recv` with `recv_varnames` joins
the received parts; here operators do. A server's schedule counts the steps that trainers report;
here it counts the updates that a server applies, which is the same number.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from jaxfleet.ir import Attrs, BlockRef, Kind, Operands, Operator, Program, Variable, trainer_name
from jaxfleet.ir.naming import LR_COUNTER, trainer_of
from jaxfleet.passes.fluid.job import GEO


def with_parts(program: Program) -> Program:
    """Returns a trainer's program with operators that split sent and join received variables."""
    made = _Parts(program)
    ops = [each for op in program.root.ops for each in made.of(op)]
    block = program.root.with_ops(ops, declare=made.declared.values())
    return program.with_block(block)


@dataclass
class _Parts:
    """Creates operators that split and join."""

    program: Program
    declared: dict[str, Variable] = field(default_factory=dict)

    @property
    def is_geo(self) -> bool:
        """Whether deltas are sent instead of gradients, as trainers update."""
        return self.program.attrs.get("mode") == GEO

    def of(self, op: Operator) -> Iterator[Operator]:
        """Yields the operators that replace an operator."""
        if op.type == "send" and (self.is_geo or op.attrs.get("use_send_handler") is False):
            return  # it reports a step, which servers see, or is replaced by the exchange of deltas
        if op.type == "send" and op.attrs.get("send_varnames") and not self._is_of_rows(op):
            yield from self._sent(op)
        elif op.type == "recv" and op.attrs.get("recv_varnames"):
            yield from self._received(op)
        else:
            yield op

    def _is_of_rows(self, op: Operator) -> bool:
        """Whether it sends rows of a table, which are split by their numbers."""
        listed = self.program.attrs.get("prefetched", ())
        assert isinstance(listed, tuple)
        return any(param in listed for param, _ in op.role_var)

    def _sent(self, op: Operator) -> Iterator[Operator]:
        (whole,), names = op.reads, _texts(op, "send_varnames")
        if names == (whole,):
            yield replace(op, attrs=_without(op, "send_varnames", "sections"))
            return
        sections = self._declare(whole, names, op)
        cut = Operator(
            "split_byref",
            Operands.named(X=whole),
            Operands.named(Out=names),
            Attrs({"sections": sections}),
            op.role,
            source=op.source,
        )
        yield cut
        attrs = _without(op, "send_varnames", "sections")
        yield replace(op, inputs=Operands.named(X=names), attrs=attrs)

    def _received(self, op: Operator) -> Iterator[Operator]:
        (whole,), names = op.writes, _texts(op, "recv_varnames")
        attrs = _without(op, "recv_varnames")
        if names == (whole,):
            yield replace(op, attrs=attrs)
            return
        self._declare(whole, names, op)
        yield replace(op, outputs=Operands.named(Out=names), attrs=attrs)
        yield Operator(
            "concat",
            Operands.named(X=names),
            Operands.named(Out=whole),
            Attrs({"axis": 0}),
            op.role,
            source=op.source,
        )

    def _declare(self, whole: str, names: tuple[str, ...], op: Operator) -> tuple[int, ...]:
        """Declares parts; returns the number of rows of each."""
        like = self.program.lookup(whole)
        rows = _rows_of_parts(self.program, op)
        sections = rows[: len(names)] if len(names) > 1 else (like.shape[0],)
        for name, count in zip(names, sections, strict=True):
            shape = (count, *like.shape[1:])
            self.declared[name] = replace(like, name=name, shape=shape, kind=Kind.TEMP)
        return tuple(int(str(count)) for count in sections)


def _rows_of_parts(program: Program, op: Operator) -> tuple[int, ...]:
    """Returns the row counts of the slices of an operator's parameter."""
    listed = program.attrs.get("slices", ())
    assert isinstance(listed, tuple)
    params = {param for param, _ in op.role_var}
    for entry in listed:
        match entry:
            case (str(param), (*rows,)) if param in params:
                return tuple(int(str(count)) for count in rows)
    return ()


def _texts(op: Operator, name: str) -> tuple[str, ...]:
    listed = op.attrs[name]
    assert isinstance(listed, tuple)
    return tuple(map(str, listed))


def _without(op: Operator, *names: str) -> Attrs:
    return Attrs({name: value for name, value in op.attrs.items() if name not in names})


# --- servers ---------------------------------------------------------------------------------


def unsummed_gradients(program: Program) -> frozenset[str]:
    """Returns the gradients that a server applies from one trainer at a time."""
    (serve,) = program.root.ops
    if serve.attrs.get("distributed_mode", 0) == 0:
        return frozenset()
    run = {ref.index for ref in _items(serve, "optimize_blocks") if isinstance(ref, BlockRef)}
    pairs = (str(pair).rpartition(":") for pair in _items(serve, "grad_to_block_id"))
    return frozenset(name for name, _, index in pairs if int(index) in run)


def with_trainer_sums(program: Program) -> Program:
    """Returns a server's program whose sums are only over trainers' gradients.

    In synchronous mode, a gradient of a single trainer, which needs no sum, becomes a sum of one.
    In asynchronous mode, schedules count updates.
    """
    (serve,) = program.root.ops
    waits = serve.attrs.get("distributed_mode", 0) == 0
    return _with_single_summands(program) if waits else _counting_updates(program)


def _counting_updates(program: Program) -> Program:
    blocks = [
        block.with_ops([_counts(op) if _adds_counters(op) else op for op in block.ops])
        for block in program.blocks
    ]
    return program.with_blocks(blocks)


def _adds_counters(op: Operator) -> bool:
    return op.type == "sum" and op.writes == (LR_COUNTER,)


def _counts(op: Operator) -> Operator:
    read = Operands.named(X=LR_COUNTER)
    return replace(op, type="increment", inputs=read, attrs=Attrs({"step": 1.0}))


def _with_single_summands(program: Program) -> Program:
    (serve,) = program.root.ops
    blocks, fed = list(program.blocks), dict[str, Variable]()
    for pair in _items(serve, "grad_to_block_id"):
        name, _, index = str(pair).rpartition(":")
        block = blocks[int(index)]
        if not block.ops or _adds(block.ops[0]) or any(name in op.writes for op in block.ops):
            continue
        summand = trainer_name(name, 0)
        fed[summand] = replace(program.lookup(name), name=summand, kind=Kind.DATA)
        added = Operator(
            "sum", Operands.named(X=summand), Operands.named(Out=name), role=block.ops[0].role
        )
        blocks[int(index)] = block.with_ops([added, *block.ops])
    return replace(program.with_blocks(blocks), variables={**program.variables, **fed})


def _adds(op: Operator) -> bool:
    """Whether an operator sums values from trainers."""
    return op.type == "sum" and all(trainer_of(name) is not None for name in op.reads)


def _items(op: Operator, name: str) -> tuple[object, ...]:
    listed = op.attrs.get(name, ())
    assert isinstance(listed, tuple)
    return listed
