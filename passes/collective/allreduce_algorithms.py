"""All-reduce algorithms: hierarchical, recursive doubling, and several streams."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxfleet.errors import PassError
from jaxfleet.ir import Block, Operator, Program
from jaxfleet.pipeline import Pass, made_by, register_pass

_REDUCTIONS = frozenset({"c_allreduce_sum", "c_allreduce_avg"})


@register_pass("two_levels")
@dataclass(frozen=True)
class TwoLevels(Pass):
    """Makes all-reduces hierarchical: each group shares the transfers to other groups.

    Devices of one machine reach each other faster than those of another. `within` neighbors first
    reduce-scatter their values, then each all-reduces its part with its counterparts in the other
    groups, and the parts are gathered within the group: across groups, a device sends 1/`within` of
    the bytes. This also applies to the mean that `meet` takes, but not to scalars, which are one
    message in any case. The order of additions changes.

    Runs after the pass that inserts all-reduces.

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

    within: int = 2  # devices per group
    devices: int = 0  # total devices; 0: the number in the program

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


_KNOWN = {"flat", "ring_id", "use_calc_stream"}  # other attributes: not over all devices


@register_pass("exchange_allreduce")
@dataclass(frozen=True)
class ExchangeAllreduce(Pass):
    """Makes all-reduces exchange values pairwise, at distances 1, 2, 4 and so on.

    A ring of n devices sends 2 (n - 1) / n of a value's bytes, in 2 (n - 1) rounds, each waiting
    for the one before. An exchange (recursive doubling) sends log2(n) times its bytes in log2(n)
    rounds. Over sockets of one machine or a fast network a round costs more than its bytes while n
    is small, above all with gloo, which splits each round in two and coordinates it by messages
    (docs/collective.md). With two devices the bytes are the same, and so is the sum, bit for bit;
    with more, the order of additions differs from a ring's. All devices use the same order.

    Requires 2, 4, 8 ... devices. Runs after `grad_allreduce`, which inserts the all-reduces, and
    after `fuse_allreduce`.

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
            return op  # booleans, keys
        return made_by(replace(op, attrs=op.attrs.updated(exchange=True)), self)


@register_pass("deal_rings")
@dataclass(frozen=True)
class DealRings(Pass):
    """Assigns gradients' all-reduces to rings round-robin, from the last to the first.

    All-reduces of one ring may be merged (`fuse_allreduce`), those of different rings never are: n
    rings are n streams, each of which starts once the last of its gradients is available. XLA
    decides which streams overlap; without merging, every all-reduce is already a stream of its own,
    and the ring only gives its place in an order.

    Runs after the pass that inserts all-reduces, and before `fuse_allreduce`.

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

    rings: int = 2  # number of rings

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
