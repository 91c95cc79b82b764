"""Rewrite a one-device step for N devices that each have some rows of the batch."""

from dataclasses import dataclass

from jaxfleet.analysis.labels import infer, mesh_of, summed
from jaxfleet.analysis.local_statistics import batch_statistics
from jaxfleet.ir import Program
from jaxfleet.passes._on_devices import check_devices, on_devices
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
        check_devices(program, self.name, self.devices)
        mesh, cut = mesh_of(program, self.devices)
        held = summed(program)
        plan = infer(program, mesh, sharded_inputs=cut, held=held)
        if self.local_statistics:
            local = batch_statistics(program, plan)
            plan = infer(program, mesh, sharded_inputs=cut, local=local, held=held)
        return on_devices(program, plan, mesh, cut, lambda op: made_by(op, self), held=held)
