"""Rewrite a one-device step for N devices that each keep and update a part of the optimizer."""

from dataclasses import dataclass

from jaxfleet.analysis.cut_state import cut_state
from jaxfleet.analysis.labels import infer, mesh_of, summed
from jaxfleet.analysis.local_statistics import batch_statistics
from jaxfleet.ir import Program
from jaxfleet.passes._on_devices import check_devices, on_devices
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("sharded_update")
@dataclass(frozen=True)
class ShardedUpdate(Pass):
    """Cuts the optimizer's state over the devices: each updates its part of each parameter.

    As `grad_allreduce`, but a gradient is summed such that each device gets its rows of the sum,
    the update goes on with rows, and the new parameter is gathered. That moves as many bytes as an
    all-reduce does (which is these two, one after the other), and each device does and keeps 1/N
    of the update: the first stage of ZeRO (Rajbhandari et al. 2020). The first axis that divides
    is cut.

    A leaf stays whole, and its gradient is reduced whole, where no axis divides, where it has the
    shape of no parameter, or where something in its update needs all rows at once. A sum over all
    elements, as clipping by the global norm takes, is completed as a number.

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

    devices: int = 2  # how many devices share the batch, and the state
    local_statistics: bool = False  # keep statistics of the batch (BatchNorm) per device

    def run(self, program: Program) -> Program:
        check_devices(program, self.name, self.devices)
        mesh, cut = mesh_of(program, self.devices)
        local: frozenset[tuple[int, int]] = frozenset()
        if self.local_statistics:
            plan = infer(program, mesh, sharded_inputs=cut, held=summed(program))
            local = batch_statistics(program, plan)
        found = cut_state(program, mesh, cut, local=local)
        return on_devices(
            program, found.plan, mesh, cut, lambda op: made_by(op, self), held=found.held
        )
