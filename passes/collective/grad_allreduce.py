"""Data parallelism: a one-device step for N devices, also with a sharded optimizer (ZeRO-1)."""

from dataclasses import dataclass, replace

from jaxfleet.analysis.sharding import mesh_of, propagate, summed_state
from jaxfleet.analysis.sharding.layout_choices import batch_statistics, shardable_state
from jaxfleet.ir import Attrs, Operands, Operator, Program
from jaxfleet.passes.collective.spmd_partitioner import check_devices, device_program
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("grad_allreduce")
@dataclass(frozen=True)
class GradAllreduce(Pass):
    """Makes each device compute on its rows, and inserts the collectives that this requires.

    Sharding follows the batch letter: a value with the letter in its shape is cut along that axis,
    an operator that reduces the letter away leaves each device a summand, and a summand is
    completed by one all-reduce where anything but a linear operator reads it. Gradients arrive at
    the optimizer as summands, so there is one all-reduce for each. Nothing is averaged, so a sum
    loss, a masked mean or a gradient norm has its one-device meaning. An operator that cannot keep
    rows apart runs replicated, on gathered rows.

    `data` variables are cut along axis 0 if that is the batch; sizes in the result are per device,
    `4*b` is that of the whole batch on four devices.

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

    devices: int = 2  # devices that share the batch
    local_statistics: bool = False  # keep statistics of the batch (BatchNorm) per device
    sum_whole: bool = False  # also sum replicated gradients, taking the first device's alone

    def run(self, program: Program) -> Program:
        check_devices(program, self.name, self.devices)
        mesh, cut = mesh_of(program, self.devices)
        held = summed_state(program)
        plan = propagate(program, mesh, sharded_inputs=cut, held=held)
        if self.local_statistics:
            local = batch_statistics(program, plan)
            plan = propagate(program, mesh, sharded_inputs=cut, local=local, held=held)
        made = device_program(program, plan, mesh, cut, lambda op: made_by(op, self), held=held)
        return self._with_whole_summed(made) if self.sum_whole else made

    def _with_whole_summed(self, program: Program) -> Program:
        """Sums replicated gradients, so that servers need not know whether a step is divided."""
        ops: list[Operator] = []
        for op in program.root.ops:
            if not op.role_var or op.type.startswith("c_allreduce"):
                ops.append(op)
                continue
            ops.append(replace(op, role_var=()))
            for pair in op.role_var:
                of = Operands.of(pair[1])
                once = Operator("c_summand", of, of, role=op.role, source=op.source)
                total = replace(once, type="c_allreduce_sum", attrs=_RING, role_var=(pair,))
                ops += made_by(once, self), made_by(total, self)
        return program.with_block(program.root.with_ops(ops))


_RING = Attrs({"ring_id": 0})


@register_pass("sharded_update")
@dataclass(frozen=True)
class ShardedUpdate(Pass):
    """Shards the optimizer's state: each device updates its part of each parameter.

    As `grad_allreduce`, but gradients are reduce-scattered, the update runs on rows, and the new
    parameter is gathered. That moves as many bytes as an all-reduce (which is these two in turn),
    and each device computes and keeps 1/N of the update: the first stage of ZeRO (Rajbhandari et
    al. 2020). The first divisible axis is cut.

    A leaf stays whole, and its gradient is all-reduced, if no axis is divisible, if it does not
    have the shape of a parameter, or if its update needs all rows at once. A sum over all elements,
    as in clipping by the global norm, is completed as a scalar.

    Before::

        program p {batch=<b>}
          data  x: f32[b,4]
          param w: f32[4]
          state m: f32[4]
          block 0
            backward
              w@GRAD: f32[4] = jax.reduce_sum(x) {axes=[0]} for (w, w@GRAD)
            optimize
              decayed: f32[4] = jax.mul(m, 0.9:f32)
              m = jax.add(decayed, w@GRAD)
              w = jax.sub(w, m)

    After::

        program p {batch=<b>, devices=2, sharded=[["x", 0], ["m", 0]]}
          data  x: f32[b,4]
          param w: f32[4]
          state m: f32[2]
          block 0
            backward
              w@GRAD.summand: f32[4] = jax.reduce_sum(x) {axes=[0]}
              w@GRAD: f32[2] = c_reducescatter(w@GRAD.summand) {axis=0, devices=2} for (w, w@GRAD)
            optimize
              decayed: f32[2] = jax.mul(m, 0.9:f32)
              m = jax.add(decayed, w@GRAD)
              w.rows: f32[2] = c_split(w) {axis=0, devices=2}
              w.own: f32[2] = jax.sub(w.rows, m)
              w = c_allgather(w.own) {axis=0, devices=2}
    """

    devices: int = 2  # devices that share the batch and the state
    local_statistics: bool = False  # keep statistics of the batch (BatchNorm) per device

    def run(self, program: Program) -> Program:
        check_devices(program, self.name, self.devices)
        mesh, cut = mesh_of(program, self.devices)
        local: frozenset[tuple[int, int]] = frozenset()
        if self.local_statistics:
            plan = propagate(program, mesh, sharded_inputs=cut, held=summed_state(program))
            local = batch_statistics(program, plan)
        found = shardable_state(program, mesh, cut, local=local)
        return device_program(
            program, found.plan, mesh, cut, lambda op: made_by(op, self), held=found.held
        )
