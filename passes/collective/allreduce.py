"""All-reduces: fused into buckets, hierarchical, by recursive doubling, in several streams."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeAlias

from jaxfleet.analysis.flow import Effects, OuterUses, Uses
from jaxfleet.analysis.memory.costs import itemsize
from jaxfleet.errors import PassError
from jaxfleet.ir import Attrs, Block, Operands, Operator, Program, Role
from jaxfleet.pipeline import Pass, made_by, register_pass

_ALLREDUCE = "c_allreduce_sum"
# Operators with equal keys can be merged: dtype, role, attributes, slots in, slots out.
_Key: TypeAlias = tuple[str, Role | None, Attrs, tuple[str, ...], tuple[str, ...]]


@register_pass("fuse_allreduce")
@dataclass(frozen=True)
class FuseAllreduce(Pass):
    """Merges all-reduces of one ring, dtype and role into one for each bucket of gradients.

    An all-reduce has a fixed cost (a rendezvous of all devices, a latency for each hop), which a
    model with many small tensors pays many times. But the bucket is copied together and apart
    again, and it starts only with its last gradient: on CPU devices that made one model's step six
    times slower and another's faster. So this is for strategies that ask for it, or measured that
    it pays: across processes, it pays for small values (`largest_bytes`; docs/collective.md).

    A bucket takes the place of its last member. An all-reduce moves down to it only past operators
    that neither use its output nor write its input, and past none with an effect. An all-reduce of
    a size known only at run time is not merged. Runs after `grad_allreduce`, which inserts the
    all-reduces.

    Before::

        program p
          data  x: f32[128,10]
          param a: f32[128]
          param b: f32[10]
          block 0
            backward
              a@GRAD: f32[128] = jax.reduce_sum(x) {axes=[1]}
              a@GRAD = c_allreduce_sum(a@GRAD) for (a, a@GRAD)
              b@GRAD: f32[10] = jax.reduce_sum(x) {axes=[0]}
              b@GRAD = c_allreduce_sum(b@GRAD) for (b, b@GRAD)
            optimize
              a = jax.sub(a, a@GRAD)
              b = jax.sub(b, b@GRAD)

    After::

        program p
          data  x: f32[128,10]
          param a: f32[128]
          param b: f32[10]
          block 0
            backward
              a@GRAD: f32[128] = jax.reduce_sum(x) {axes=[1]}
              b@GRAD: f32[10] = jax.reduce_sum(x) {axes=[0]}
              a@GRAD, b@GRAD = c_allreduce_sum(a@GRAD, b@GRAD) {flat=true} for (a, a@GRAD), (b, b@GRAD)
            optimize
              a = jax.sub(a, a@GRAD)
              b = jax.sub(b, b@GRAD)
    """  # noqa: E501  # an operator is one line

    bucket_size_bytes: int = 4 * 1024 * 1024  # the most bytes per all-reduce
    flat: bool = True  # reduce one concatenated array instead of a tuple of arrays
    largest_bytes: int = 0  # the largest value that joins a bucket; 0: any
    across_roles: bool = False  # gradients and metrics may share a bucket, in the last one's role

    runs_after = ("grad_allreduce",)

    def __post_init__(self) -> None:
        if self.bucket_size_bytes <= 0:
            what = f"fuse_allreduce: bucket_size_bytes is {self.bucket_size_bytes}"
            raise PassError(what, hint="give a positive number of bytes")
        if self.largest_bytes < 0:
            what = f"fuse_allreduce: largest_bytes is {self.largest_bytes}"
            raise PassError(what, hint="give a positive number of bytes, or 0 for any")

    def run(self, program: Program) -> Program:
        uses, effects = OuterUses(program), Effects()
        return program.with_blocks(
            self._gather(program, block, uses, effects) for block in program.blocks
        )

    def _gather(self, program: Program, block: Block, uses: OuterUses, effects: Effects) -> Block:
        ops: list[Operator | None] = []
        buckets: list[_Bucket] = []
        growing: dict[_Key, _Bucket] = {}
        for op in block.ops:
            if growing:
                growing = _still_growing(growing, op, uses, effects)
            ops.append(op)
            size = _size_bytes(program, block, op)
            if size is None or size > (self.largest_bytes or size):
                continue
            key = _key(program, block, op, role=None if self.across_roles else op.role)
            bucket = growing.get(key)
            if bucket is None or bucket.size_bytes + size > self.bucket_size_bytes:
                bucket = growing[key] = _Bucket()
                buckets.append(bucket)
            else:
                ops[bucket.place] = None
            bucket.add(op, size, place=len(ops) - 1)
        full = [bucket for bucket in buckets if len(bucket.members) > 1]
        for bucket in full:
            ops[bucket.place] = self._fused(bucket.members)
        return block.with_ops(op for op in ops if op is not None) if full else block

    def _fused(self, members: Sequence[Operator]) -> Operator:
        first = members[0]
        op = replace(
            first,
            role=members[-1].role,
            inputs=_joined([member.inputs for member in members]),
            outputs=_joined([member.outputs for member in members]),
            attrs=first.attrs.updated(flat=True) if self.flat else first.attrs,
            role_var=tuple(pair for member in members for pair in member.role_var),
        )
        return made_by(op, self)


@dataclass
class _Bucket:
    """All-reduces to merge at the position of the last one."""

    members: list[Operator] = field(default_factory=list)
    inputs: set[str] = field(default_factory=set)
    outputs: set[str] = field(default_factory=set)
    size_bytes: int = 0
    place: int = -1

    def add(self, op: Operator, size_bytes: int, *, place: int) -> None:
        self.members.append(op)
        self.inputs.update(op.reads)
        self.outputs.update(op.writes)
        self.size_bytes += size_bytes
        self.place = place

    def may_move_past(self, uses: Uses) -> bool:
        return (
            self.outputs.isdisjoint(uses.reads)
            and self.outputs.isdisjoint(uses.writes)
            and self.inputs.isdisjoint(uses.writes)
        )


def _still_growing(
    growing: dict[_Key, _Bucket], op: Operator, uses: OuterUses, effects: Effects
) -> dict[_Key, _Bucket]:
    """Returns the buckets whose members may move down past an operator."""
    if op.type != _ALLREDUCE and effects.has_effect(op):
        return {}
    used = uses.of(op)
    return {key: bucket for key, bucket in growing.items() if bucket.may_move_past(used)}


def _key(program: Program, block: Block, op: Operator, *, role: Role | None) -> _Key:
    dtype = program.lookup(op.reads[0], block).dtype
    slots_in, slots_out = (tuple(slot for slot, _ in x.slots) for x in (op.inputs, op.outputs))
    return dtype, role, op.attrs, slots_in, slots_out


def _size_bytes(program: Program, block: Block, op: Operator) -> int | None:
    """Returns the bytes that an operator reduces, or None if it cannot join a bucket."""
    if op.type != _ALLREDUCE or not op.reads or len(op.reads) != len(op.inputs):
        return None
    variables = [program.lookup(name, block) for name in op.reads]
    known = [[size for size in v.shape if isinstance(size, int)] for v in variables]
    is_known = [len(sizes) for sizes in known] == [len(v.shape) for v in variables]
    dtype = variables[0].dtype
    is_alike = all(v.dtype == dtype for v in variables) and re.search(r"\d", dtype) is not None
    return sum(map(prod, known)) * itemsize(dtype) if is_known and is_alike else None


def _joined(operands: Sequence[Operands]) -> Operands:
    names = [slot for slot, _ in operands[0].slots]
    return Operands(
        (name, tuple(item for each in operands for item in each.slot(name))) for name in names
    )


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
