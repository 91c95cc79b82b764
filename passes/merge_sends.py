"""Join a trainer's sends that stand together, so that each server gets one message of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jaxfleet.analysis.holdings import bytes_of
from jaxfleet.ir import Attr, Attrs, Operands, Operator, Program, Role
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("merge_sends")
@dataclass(frozen=True)
class MergeSends(Pass):
    """Makes one `send` of those that follow one another; it is one message to every server.

    Only what is small is joined, up to `max_bytes` in all: a server adds and updates what came
    while the rest is still on its way. Receives are joined whatever their size, since servers
    answer them piece by piece. `schedule_sends` is what puts them side by side.

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

    max_bytes: int = 1 << 20  # of sends that are joined

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
