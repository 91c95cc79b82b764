"""The sends of a trainer: merged by server, compressed, and scheduled early."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from jaxfleet.analysis.flow import Effects, OuterUses
from jaxfleet.analysis.placement.policies import bytes_of
from jaxfleet.analysis.placement.sliced_layout import joins_slices
from jaxfleet.errors import PassError
from jaxfleet.ir import Attr, Attrs, Operands, Operator, Program, Role
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("merge_sends")
@dataclass(frozen=True)
class MergeSends(Pass):
    """Merges consecutive `send` operators into one message to every server.

    Only small values are merged, up to `max_bytes` in all: a server merges and updates received
    values while the rest is still in transit. Receives are merged whatever their size, since
    servers answer them piece by piece. `schedule_sends` makes them adjacent.

    Before::

        program p {role="trainer"}
          data  a: f32[4]
          data  b: f32[2]
          block 0
            rpc
              send(X=a) {epmap=["s:1"]}
              send(X=b) {epmap=["s:2"]}

    After::

        program p {role="trainer"}
          data  a: f32[4]
          data  b: f32[2]
          block 0
            rpc
              send(X=[a, b]) {epmap=["s:1", "s:2"]}
    """

    max_bytes: int = 1 << 20  # total of merged sends

    runs_after = ("insert_send_recv", "schedule_sends")

    def run(self, program: Program) -> Program:
        ops = list(self._merged(program))
        same = len(ops) == len(program.root.ops)
        return program if same else program.with_block(program.root.with_ops(ops))

    def _merged(self, program: Program) -> Iterator[Operator]:
        waiting: list[Operator] = []
        size = 0
        for op in program.root.ops:
            size += self._bytes(program, op)
            if waiting and (op.type != waiting[0].type or size > self.max_bytes):
                yield self._join(waiting)
                waiting, size = [], self._bytes(program, op)
            if op.type in {"send", "recv"}:
                waiting.append(op)
            else:
                yield op
        if waiting:
            yield self._join(waiting)

    def _bytes(self, program: Program, op: Operator) -> int:
        if op.type != "send":
            return 0
        sent = (program.lookup(name) for name in op.reads)
        return sum(bytes_of(v) for v in sent if all(isinstance(size, int) for size in v.shape))

    def _join(self, ops: Sequence[Operator]) -> Operator:
        if len(ops) == 1:
            return ops[0]
        first, epmap = ops[0], tuple(at for op in ops for at in _endpoints(op))
        reads, writes = [x for op in ops for x in op.reads], [x for op in ops for x in op.writes]
        joined = replace(
            first,
            inputs=Operands.named(X=reads) if reads else Operands(),
            outputs=Operands.named(Out=writes) if writes else Operands(),
            attrs=Attrs({**first.attrs, "epmap": epmap}),
            role=Role.RPC,
            role_var=tuple(pair for op in ops for pair in op.role_var),
        )
        return made_by(joined, self)


def _endpoints(op: Operator) -> tuple[Attr, ...]:
    found = op.attrs["epmap"]
    assert isinstance(found, tuple)
    return found


_METHODS = ("fp16", "int8", "topk")


@register_pass("compress_sends")
@dataclass(frozen=True)
class CompressSends(Pass):
    """Marks each `send` of gradients with the host's compression of it.

    The compression error is added to the next gradient (error feedback). Of each send, float32
    gradients with at least `min_elements` are compressed; servers decompress them before merging,
    so their programs stay the same. If several gradients are merged into a message, the merged one
    is compressed. The encodings are in `jaxfleet.ps.gradient_encoding`. The result of a compressed
    job approximates the one-device run.

    Before::

        program p {role="trainer"}
          data  w@GRAD: f32[4096]
          block 0
            rpc
              send(X=w@GRAD) {epmap=["s:1"]}

    After::

        program p {role="trainer"}
          data  w@GRAD: f32[4096]
          block 0
            rpc
              send(X=w@GRAD) {compress="int8", epmap=["s:1"], min_elements=1024}

    Examples:
        >>> from jaxfleet.ir import parse
        >>> from jaxfleet.passes import CompressSends
        >>> from jaxfleet.testing import docstring_programs
        >>> program = parse(docstring_programs(CompressSends)[0][0])
        >>> (send,) = CompressSends("topk", ratio=0.1).run(program).root.ops
        >>> send.attrs["compress"], send.attrs["ratio"]
        ('topk', 0.1)
    """

    method: str = "int8"
    ratio: float = 0.01  # topk: the fraction of elements sent
    min_elements: int = 1024  # below that, the message header dominates

    runs_after = ("insert_send_recv", "merge_sends")

    def __post_init__(self) -> None:
        if self.method not in _METHODS:
            what = f"compress_sends: method is '{self.method}'"
            raise PassError(what, hint=f"choose one of {', '.join(_METHODS)}")
        if not 0 < self.ratio <= 1:
            raise PassError(f"compress_sends: ratio is {self.ratio}, not within (0, 1]")

    def run(self, program: Program) -> Program:
        if program.attrs.get("communication") == "fl":
            # The compression error of a value cannot be repaired by adding it to the next value.
            what = f"compress_sends: '{program.name}' sends parameters, and no gradients"
            raise PassError(what, hint="leave it out; communication='geo' sends changes")
        ops = [self._marked(op) for op in program.root.ops]
        return program.with_block(program.root.with_ops(ops))

    def _marked(self, op: Operator) -> Operator:
        if op.type != "send" or "table" in op.attrs:
            return op
        more: dict[str, str | int | float] = {
            "compress": self.method,
            "min_elements": self.min_elements,
        }
        if self.method == "topk":
            more["ratio"] = self.ratio
        return made_by(replace(op, attrs=Attrs({**op.attrs, **more})), self)


_SENDS = ("split_byref", "send")
_TO_SERVERS = ("send_barrier", "recv", "fetch_barrier")


@register_pass("schedule_sends")
@dataclass(frozen=True)
class ScheduleSends(Pass):
    """Sorts a trainer's operators by the number of server responses that they must wait for.

    Operators that depend on no response run first, then all requests of that round are in flight at
    once, then operators that depend on their responses, and so on, which minimizes the waits of a
    step. Sends leave in `cuts` groups of about equal bytes, each once its last gradient is made:
    every group but the last cuts the computation in two, which prevents XLA's fusion across the
    cut, but lets servers begin.

    Before::

        program p {role="trainer"}
          data  x: f32[4]
          param w: f32[4]
          block 0
            backward
              total: f32[] = jax.reduce_sum(x) {axes=[0]}
              total = c_allreduce_sum(total) {endpoint="a:1"}
              w@GRAD: f32[4] = jax.mul(x, w)
            rpc
              send(X=w@GRAD) {epmap=["a:1"]}
              send_barrier() {endpoints=["a:1"]}
              Out=w = recv() {epmap=["a:1"]}
              fetch_barrier() {endpoints=["a:1"]}
            optimize
              fetch(total)

    After::

        program p {role="trainer"}
          data  x: f32[4]
          param w: f32[4]
          block 0
            backward
              total: f32[] = jax.reduce_sum(x) {axes=[0]}
              w@GRAD: f32[4] = jax.mul(x, w)
            rpc
              send(X=w@GRAD) {epmap=["a:1"]}
            backward
              total = c_allreduce_sum(total) {endpoint="a:1"}
            rpc
              send_barrier() {endpoints=["a:1"]}
              Out=w = recv() {epmap=["a:1"]}
              fetch_barrier() {endpoints=["a:1"]}
            optimize
              fetch(total)
    """

    cuts: int = 1  # groups that the sends leave in

    runs_after = ("insert_send_recv",)

    def run(self, program: Program) -> Program:
        if self.cuts < 1:
            raise PassError(f"schedule_sends: {self.cuts} cuts", hint="1 sends everything at once")
        if program.attrs.get("role") != "trainer":
            return program
        rounds = _Rounds(program).all()
        ops = [op for found in rounds for op in self._round(program, found)]
        return program.with_block(program.root.with_ops(ops))

    def _round(self, program: Program, ops: Sequence[Operator]) -> Iterator[Operator]:
        last = ("collective", *_TO_SERVERS, "join", "fetch")
        late: dict[str, list[Operator]] = {kind: [] for kind in last}
        effects, early = Effects(), list[Operator]()
        for op in ops:
            kind = "collective" if effects.is_collective(op) else op.type
            late.get("join" if joins_slices(op) else kind, early).append(op)
        yield from _with_sends(program, early, self.cuts)
        for kind in last:
            yield from late[kind]


@dataclass
class _Rounds:
    """Counts the successive responses that each operator of block 0 waits for."""

    program: Program
    levels: list[int] = field(default_factory=list)
    effects: Effects = field(default_factory=Effects)

    def all(self) -> list[list[Operator]]:
        ops, uses = self.program.root.ops, OuterUses(self.program)
        writer: dict[str, int] = {}
        readers: dict[str, list[int]] = {}
        joined = {part: op.writes for op in ops if joins_slices(op) for part in op.reads}
        asked = barrier = 0
        for place, op in enumerate(ops):
            used = uses.of(op)
            after = [self._done(writer[name], op) for name in used.reads if name in writer]
            for name in _overwritten(op, used.writes, joined):
                after += [self._done(writer[name], op)] if name in writer else []
                after += [self._read(at, op) for at in readers.get(name, ())]
            level = max(after, default=0)
            if op.type == "send" or self.effects.is_collective(op):
                # Servers may wait for another trainer, which needs this sum first.
                asked = max(asked, level)
            elif op.type in _TO_SERVERS:
                level = barrier = max(level, barrier, asked)
            elif op.type == "fetch":
                level = max([level, *self.levels])
            self.levels.append(level)
            for name in used.reads:
                readers.setdefault(name, []).append(place)
            for name in used.writes:
                writer[name], readers[name] = place, []
        found: list[list[Operator]] = [[] for _ in range(max(self.levels, default=0) + 1)]
        for op, level in zip(ops, self.levels, strict=True):
            found[level].append(op)
        return found

    def _done(self, place: int, reader: Operator) -> int:
        """Returns the round in which an operator's outputs are available to another."""
        op = self.program.root.ops[place]
        same = joins_slices(reader) and op.type == "recv"
        return self.levels[place] + (self._is_waited_for(op) and not same)

    def _read(self, place: int, writer: Operator) -> int:
        """Returns the first round in which an operator's inputs may be overwritten."""
        late = self._is_waited_for(self.program.root.ops[place])
        return self.levels[place] + (late and not self._is_waited_for(writer))

    def _is_waited_for(self, op: Operator) -> bool:
        return op.type == "recv" or joins_slices(op) or self.effects.is_collective(op)


def _overwritten(
    op: Operator, writes: Iterable[str], joined: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yields an operator's outputs; for a `recv`, also values joined of them in the same round."""
    yield from writes
    if op.type == "recv":
        yield from (whole for part in writes for whole in joined.get(part, ()))


def _with_sends(program: Program, ops: Sequence[Operator], cuts: int) -> Iterator[Operator]:
    sizes = [_elements(program, op) if op.type == "send" else 0 for op in ops]
    total, sent, group = sum(sizes), 0, 1
    waiting: list[Operator] = []
    for op, size in zip(ops, sizes, strict=True):
        if op.type not in _SENDS:
            yield op
            continue
        waiting.append(op)
        sent += size
        if op.type == "send" and group < cuts and sent * cuts >= total * group:
            yield from _split_first(waiting)
            waiting, group = [], group + 1
    yield from _split_first(waiting)


def _split_first(ops: Sequence[Operator]) -> Iterator[Operator]:
    yield from (op for op in ops if op.type == "split_byref")
    yield from (op for op in ops if op.type == "send")


def _elements(program: Program, op: Operator) -> int:
    shapes = [program.lookup(name).shape for name in op.reads]
    return sum(prod(size for size in shape if isinstance(size, int)) for shape in shapes)
