"""Rewrite a one-device step for N devices that each have some rows of the batch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxfleet.analysis.labels import Layout, Mesh, Plan, infer
from jaxfleet.analysis.local_statistics import batch_statistics
from jaxfleet.errors import PassError
from jaxfleet.ir import Dim, Kind, Program
from jaxfleet.passes._place import place_blocks
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("grad_allreduce")
@dataclass(frozen=True)
class GradAllreduce(Pass):
    """Makes each device compute on its rows, and completes what needs all of them.

    The batch letter does the work: a value with the letter in its shape is cut along that axis,
    an operator that reduces the letter away leaves each device a summand, and a summand is
    completed by one all-reduce where anything but a linear operator reads it. Gradients arrive at
    the optimizer as summands, so there is one all-reduce for each; nothing is averaged, and so a
    sum loss, a masked mean or a gradient norm means what it meant on one device. An operator that
    cannot keep rows apart runs whole on every device, on gathered rows.

    `data` variables are cut along axis 0 where that is the batch; sizes in the result are a
    device's own, `4*b` that of the whole batch on four devices.

    Before::

        program p {batch=<b>}
          data  x: f32[b,3]
          param w: f32[3]
          block 0
            forward
              y: f32[b] = jax.dot_general(x, w) {dimension_numbers=[[[1], [0]], [[], []]]}
              total: f32[] = jax.reduce_sum(y) {axes=[0]}
              rows: i32[] = jax.dim_value() {dim=<b>, dtype=i32}
            backward
              one: f32[b] = jax.broadcast_in_dim(1.0:f32) {broadcast_dimensions=[], shape=[<b>]}
              w@GRAD: f32[3] = jax.dot_general(one, x) {dimension_numbers=[[[0], [0]], [[], []]]} for (w, w@GRAD)
            optimize
              w = jax.sub(w, w@GRAD)
              fetch(total, rows)

    After::

        program p {batch=<b>, devices=2, sharded=[["x", 0]]}
          data  x: f32[b,3]
          param w: f32[3]
          block 0
            forward
              y: f32[b] = jax.dot_general(x, w) {dimension_numbers=[[[1], [0]], [[], []]]}
              total: f32[] = jax.reduce_sum(y) {axes=[0]}
              total = c_allreduce_sum(total) {ring_id=0}
              rows: i32[] = jax.dim_value() {dim=<2*b>, dtype=i32}
            backward
              one: f32[b] = jax.broadcast_in_dim(1.0:f32) {broadcast_dimensions=[], shape=[<b>]}
              w@GRAD: f32[3] = jax.dot_general(one, x) {dimension_numbers=[[[0], [0]], [[], []]]}
              w@GRAD = c_allreduce_sum(w@GRAD) {ring_id=0} for (w, w@GRAD)
            optimize
              w = jax.sub(w, w@GRAD)
              fetch(total, rows)
    """  # noqa: E501  # an operator stands on one line

    devices: int = 2  # how many devices share the batch
    local_statistics: bool = False  # keep statistics of the batch (BatchNorm) per device

    def run(self, program: Program) -> Program:
        if "devices" in program.attrs:
            raise PassError("grad_allreduce: the program is already rewritten for devices")
        if self.devices < 1:
            raise PassError(f"grad_allreduce: {self.devices} devices")
        mesh, cut = mesh_of(program, self.devices)
        plan = infer(program, mesh, sharded_inputs=cut)
        if self.local_statistics:
            local = batch_statistics(program, plan)
            plan = infer(program, mesh, sharded_inputs=cut, local=local)
        placed = place_blocks(program, plan, mesh, lambda op: made_by(op, self))
        attrs = program.attrs.updated(
            devices=self.devices, sharded=tuple((n, a) for n, a in _sharded(program, plan, cut))
        )
        return replace(placed, attrs=attrs)


def mesh_of(program: Program, devices: int) -> tuple[Mesh, dict[str, int]]:
    """Returns the devices as labels see them, and the data variables that are cut.

    Raises:
        PassError: a batch of a fixed size cannot be divided.
    """
    batch = program.attrs.get("batch")
    if isinstance(batch, int) and batch % devices:
        what = f"a batch of {batch} rows cannot be divided among {devices} devices"
        raise PassError(what, hint=f"use a multiple of {devices} rows")
    cut = {v.name: 0 for v in program.of_kind(Kind.DATA) if v.shape and v.shape[0] == batch}
    name = min(batch.letters) if isinstance(batch, Dim) else None
    return Mesh(devices, name, batch if isinstance(batch, int) else None), cut


def _sharded(program: Program, plan: Plan, cut: Mapping[str, int]) -> list[tuple[str, int]]:
    """Returns what goes in and comes out cut, with the axes."""
    found = list(cut.items())
    for op in program.root.ops:
        if op.type == "fetch":
            labels = [(name, plan.blocks[0].final[name]) for name in op.reads]
            found += [(name, x.axis) for name, x in labels if x.layout is Layout.SHARDED]
    return found
