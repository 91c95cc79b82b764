"""Sums over devices by exchanges in pairs, rather than around a ring."""

import re
from dataclasses import dataclass, replace

from jaxfleet.errors import PassError
from jaxfleet.ir import Block, Operator, Program
from jaxfleet.pipeline import Pass, made_by, register_pass

_KNOWN = {"flat", "ring_id", "use_calc_stream"}  # an all-reduce with others is not over all devices


@register_pass("exchange_allreduce")
@dataclass(frozen=True)
class ExchangeAllreduce(Pass):
    """Has devices exchange what they add up in pairs: with one, then two, then four apart.

    A ring of n devices sends 2 (n - 1) / n of a value's bytes, in 2 (n - 1) rounds, each waiting
    for the one before. An exchange sends log2(n) times its bytes in log2(n) rounds. Over sockets
    of one machine or a fast network a round costs more than its bytes while n is small, above all
    by gloo, where each is cut in two again and agreed on by messages (docs/collective.md). With
    two devices the bytes are the same, and so is the sum to the bit; with more, the order of
    additions differs from a ring's. On all devices it is the same order.

    For 2, 4, 8 ... devices. Runs after `grad_allreduce`, which inserts the all-reduces, and after
    `fuse_allreduce`.

    Before::

        program p
          data  x: f32[128,10]
          param w: f32[10]
          block 0
            backward
              w@GRAD: f32[10] = jax.reduce_sum(x) {axes=[0]}
              w@GRAD = c_allreduce_sum(w@GRAD) {ring_id=0} for (w, w@GRAD)
            optimize
              w = jax.sub(w, w@GRAD)

    After::

        program p
          data  x: f32[128,10]
          param w: f32[10]
          block 0
            backward
              w@GRAD: f32[10] = jax.reduce_sum(x) {axes=[0]}
              w@GRAD = c_allreduce_sum(w@GRAD) {exchange=true, ring_id=0} for (w, w@GRAD)
            optimize
              w = jax.sub(w, w@GRAD)
    """

    devices: int = 2  # a power of two

    runs_after = ("grad_allreduce", "fuse_allreduce")

    def __post_init__(self) -> None:
        if self.devices < 2 or self.devices & (self.devices - 1):
            what = f"exchange_allreduce: {self.devices} devices do not go in pairs"
            raise PassError(what, hint="use it for 2, 4, 8 ... devices")

    def run(self, program: Program) -> Program:
        return program.with_blocks(
            block.with_ops(self._by_exchange(program, block, op) for op in block.ops)
            for block in program.blocks
        )

    def _by_exchange(self, program: Program, block: Block, op: Operator) -> Operator:
        if op.type != "c_allreduce_sum" or not _KNOWN.issuperset(op.attrs):
            return op
        dtypes = [program.lookup(name, block).dtype for name in op.reads]
        if not all(re.fullmatch(r"(bf|[fiu])\d+", dtype) for dtype in dtypes):
            return op  # truth values, keys
        return made_by(replace(op, attrs=op.attrs.updated(exchange=True)), self)
