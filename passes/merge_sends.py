"""Join a trainer's sends that stand together, so that each server gets one message of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jaxfleet.ir import Attr, Attrs, Operands, Operator, Program, Role
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("merge_sends")
@dataclass(frozen=True)
class MergeSends(Pass):
    """Makes one `send` of those that follow one another; it is one message to every server.

    Receives are joined alike. `schedule_sends` is what puts them side by side.

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

    runs_after = ("insert_send_recv", "schedule_sends")

    def run(self, program: Program) -> Program:
        ops = list(self._merged(program.root.ops))
        same = len(ops) == len(program.root.ops)
        return program if same else program.with_block(program.root.with_ops(ops))

    def _merged(self, ops: Sequence[Operator]) -> Iterator[Operator]:
        waiting: list[Operator] = []
        for op in ops:
            if waiting and op.type != waiting[0].type:
                yield self._join(waiting)
                waiting = []
            if op.type in {"send", "recv"}:
                waiting.append(op)
            else:
                yield op
        if waiting:
            yield self._join(waiting)

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
