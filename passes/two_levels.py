"""Reduce within groups of devices, across the groups, and within again."""

from dataclasses import dataclass, replace

from jaxfleet.errors import PassError
from jaxfleet.ir import Operator, Program
from jaxfleet.pipeline import Pass, made_by, register_pass

_REDUCTIONS = frozenset({"c_allreduce_sum", "c_allreduce_avg"})


@register_pass("two_levels")
@dataclass(frozen=True)
class TwoLevels(Pass):
    """Makes all-reduces of two levels: neighbours share what goes to the other groups.

    Devices of one machine reach each other faster than those of another. `within` neighbours first
    sum such that each has its part of their sum, then each exchanges its part with its
    counterparts in the other groups, and the parts are gathered within: across goes 1/`within` of
    the bytes a device. The mean that `meet` takes is reduced so too; numbers, which are one
    message in any case, are not. Sums are added up in another order.

    Runs after the pass that puts all-reduces in.

    Before::

        program p {devices=4}
          param w: f32[4]
          block 0
            backward
              w@GRAD: f32[4] = jax.neg(w)
              w@GRAD = c_allreduce_sum(w@GRAD) {ring_id=0} for (w, w@GRAD)
              loss: f32[] = jax.reduce_sum(w@GRAD) {axes=[0]}
              loss = c_allreduce_sum(loss) {ring_id=0}

    After::

        program p {devices=4}
          param w: f32[4]
          block 0
            backward
              w@GRAD: f32[4] = jax.neg(w)
              w@GRAD = c_allreduce_sum(w@GRAD) {ring_id=0, within=2} for (w, w@GRAD)
              loss: f32[] = jax.reduce_sum(w@GRAD) {axes=[0]}
              loss = c_allreduce_sum(loss) {ring_id=0}
    """

    within: int = 2  # devices of a group
    devices: int = 0  # of all groups; 0 for those that the program names

    runs_after = ("grad_allreduce", "data_parallel")

    def run(self, program: Program) -> Program:
        devices = self.devices or program.attrs.get("devices", 1)
        assert isinstance(devices, int)
        if not 1 < self.within < devices or devices % self.within:
            what = f"{self.name}: {devices} devices in groups of {self.within}"
            raise PassError(what, hint="a group has more than one device, and there are several")

        def changed(op: Operator, shapes: list[int]) -> Operator:
            if op.type not in _REDUCTIONS or not all(shapes):
                return op
            return made_by(replace(op, attrs=op.attrs.updated(within=self.within)), self)

        return program.with_blocks(
            block.with_ops(
                changed(op, [len(program.lookup(name, block).shape) for name in op.reads])
                for op in block.ops
            )
            for block in program.blocks
        )
