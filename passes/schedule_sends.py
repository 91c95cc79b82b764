"""Order a trainer's operators: sends as early as their gradients allow, few waits for servers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jaxfleet.analysis.slices import joins_slices
from jaxfleet.analysis.uses import OuterUses
from jaxfleet.errors import PassError
from jaxfleet.ir import Operator, Program, Variable
from jaxfleet.passes._effects import Effects
from jaxfleet.pipeline import Pass, register_pass

_SENDS = ("split_byref", "send")
_TO_SERVERS = ("send_barrier", "recv", "fetch_barrier")


@register_pass("schedule_sends")
@dataclass(frozen=True)
class ScheduleSends(Pass):
    """Sorts a trainer's operators by how many answers of servers they have to wait for.

    What depends on no answer runs first, then all requests of that round are under way at once,
    then what depends on their answers, and so on; so a step waits as seldom as it can. Sends leave
    in `cuts` groups of about as many bytes, each once its last gradient is made: every group but
    the last cuts the computation in two, which costs what XLA could have fused, and lets servers
    begin.

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
        """Yields the operators of one round in their order."""
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
    """Finds for every operator of block 0 how many answers it waits for, one after another."""

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
                # What servers make may need what another trainer sends, who needs this sum for it.
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
        """Returns the round in which an operator's outputs are there for another."""
        op = self.program.root.ops[place]
        same = joins_slices(reader) and op.type == "recv"
        return self.levels[place] + (self._is_waited_for(op) and not same)

    def _read(self, place: int, writer: Operator) -> int:
        """Returns the first round in which what an operator has read may be overwritten."""
        late = self._is_waited_for(self.program.root.ops[place])
        return self.levels[place] + (late and not self._is_waited_for(writer))

    def _is_waited_for(self, op: Operator) -> bool:
        return op.type == "recv" or joins_slices(op) or self.effects.is_collective(op)


def _overwritten(
    op: Operator, writes: Iterable[str], joined: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yields what an operator writes; a `recv`, what its parts are joined to in the same round."""
    yield from writes
    if op.type == "recv":
        yield from (whole for part in writes for whole in joined.get(part, ()))


def _with_sends(program: Program, ops: Sequence[Operator], cuts: int) -> Iterator[Operator]:
    """Yields the operators with the sends moved together, in groups."""
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
    return sum(_size(program.lookup(name)) for name in op.reads)


def _size(variable: Variable) -> int:
    count = 1
    for size in variable.shape:
        count *= size if isinstance(size, int) else 1
    return count
