"""Deal all-reduces of gradients out to several rings."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxfleet.errors import PassError
from jaxfleet.ir import Operator, Program
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("deal_rings")
@dataclass(frozen=True)
class DealRings(Pass):
    """Gives gradients' all-reduces a ring each, in turn from the last to the first.

    All-reduces of one ring may be joined into one (`fuse_allreduce`), those of different rings
    never are: with n rings there are n streams, each of which begins when the last of its
    gradients is there. Which streams overlap is XLA's to decide; where nothing is joined, every
    all-reduce is a stream of its own already, and a ring says its place in an order, no more.

    Runs after the pass that puts all-reduces in, and before `fuse_allreduce`.

    Before::

        program p {devices=2}
          param a: f32[4]
          param b: f32[4]
          block 0
            backward
              a@GRAD: f32[4] = jax.neg(a)
              a@GRAD = c_allreduce_sum(a@GRAD) {ring_id=0} for (a, a@GRAD)
              b@GRAD: f32[4] = jax.neg(b)
              b@GRAD = c_allreduce_sum(b@GRAD) {ring_id=0} for (b, b@GRAD)

    After::

        program p {devices=2}
          param a: f32[4]
          param b: f32[4]
          block 0
            backward
              a@GRAD: f32[4] = jax.neg(a)
              a@GRAD = c_allreduce_sum(a@GRAD) {ring_id=1} for (a, a@GRAD)
              b@GRAD: f32[4] = jax.neg(b)
              b@GRAD = c_allreduce_sum(b@GRAD) {ring_id=0} for (b, b@GRAD)
    """

    rings: int = 2  # how many

    runs_after = ("grad_allreduce",)

    def __post_init__(self) -> None:
        if self.rings < 1:
            raise PassError(f"deal_rings: {self.rings} rings", hint="rings is at least 1")

    def run(self, program: Program) -> Program:
        return program.with_blocks(
            block.with_ops(reversed([*self._dealt(reversed(block.ops))]))
            for block in program.blocks
        )

    def _dealt(self, ops: Iterator[Operator]) -> Iterator[Operator]:
        count = 0
        for op in ops:
            if op.type != "c_allreduce_sum" or not op.role_var:
                yield op
                continue
            attrs = op.attrs.updated(ring_id=count % self.rings)
            yield made_by(replace(op, attrs=attrs), self)
            count += 1
