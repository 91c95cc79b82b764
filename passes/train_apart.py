"""Rewrite a one-device step for N devices that each train by themselves, on their own rows."""

from dataclasses import dataclass

from jaxfleet.analysis.flow import Flow
from jaxfleet.analysis.labels import VARYING, Held, Mesh, Plan, infer, mesh_of
from jaxfleet.ir import Kind, Program
from jaxfleet.passes._on_devices import check_devices, on_devices
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("train_apart")
@dataclass(frozen=True)
class TrainApart(Pass):
    """Makes each device update a state of its own by its own rows.

    As `grad_allreduce`, but a sum over the batch that reaches the state stays a device's own, and
    is scaled up to stand for the whole batch's. What then differs between devices is `own`: every
    device keeps its own from step to step. What does not (a count of steps, a key that dropout
    draws from) is the same everywhere. Metrics are complete over all devices, by an all-reduce.

    Devices drift apart until they `meet`.

    Before::

        program p {batch=<b>}
          data  x: f32[b,4]
          param w: f32[4]
          block 0
            forward
              total: f32[] = jax.reduce_sum(x) {axes=[0, 1]}
            backward
              w@GRAD: f32[4] = jax.reduce_sum(x) {axes=[0]} for (w, w@GRAD)
            optimize
              w = jax.sub(w, w@GRAD)
              fetch(total)

    After::

        program p {batch=<b>, devices=2, own=["w"], sharded=[["x", 0]]}
          data  x: f32[b,4]
          param w: f32[4]
          block 0
            forward
              total: f32[] = jax.reduce_sum(x) {axes=[0, 1]}
              total = c_allreduce_sum(total) {ring_id=0}
            backward
              w@GRAD: f32[4] = jax.reduce_sum(x) {axes=[0]}
              w@GRAD = c_local(w@GRAD) {devices=2} for (w, w@GRAD)
            optimize
              w = jax.sub(w, w@GRAD)
              fetch(total)
    """

    devices: int = 2  # how many devices train

    def run(self, program: Program) -> Program:
        check_devices(program, self.name, self.devices)
        mesh, cut = mesh_of(program, self.devices)
        held, plan = _held(program, mesh, cut)
        return on_devices(program, plan, mesh, cut, lambda op: made_by(op, self), held=held)


def _held(program: Program, mesh: Mesh, cut: dict[str, int]) -> tuple[Held, Plan]:
    """Returns what of the state comes to differ between devices, and how the step runs then."""
    local = _reaching_state(program, mesh)
    held = Held()
    while True:
        plan = infer(program, mesh, sharded_inputs=cut, local=local, held=held)
        final = plan.blocks[0].final
        state = [v.name for v in program.of_kind(Kind.PARAM, Kind.STATE)]
        own = [name for name in state if name in held.state or final[name] == VARYING]
        if len(own) == len(held.state):
            return held, plan
        held = Held(dict.fromkeys(own, VARYING))


def _reaching_state(program: Program, mesh: Mesh) -> frozenset[tuple[int, int]]:
    """Returns the operators, by block and place, that the new state is computed from.

    Without those that make rows of all devices of summands, as the gradient of `x[indices]` is
    added up: nothing was summed over the batch there that a device's own part could stand for.
    """
    flow = Flow.of(program)
    names = [v.name for v in program.of_kind(Kind.PARAM, Kind.STATE)]
    ends = {flow.final[name] for name in names if name in flow.final}
    found = ends | flow.reaching(ends, lambda _: True)
    places = {(value.block, value.place) for value in found if value.place >= 0}
    return frozenset(at for at in places if not _makes_rows(program, mesh, *at))


def _makes_rows(program: Program, mesh: Mesh, index: int, place: int) -> bool:
    block = program.blocks[index]
    op = block.ops[place]
    if op.role_var:
        return False
    sizes = [size for name in op.writes for size in program.lookup(name, block).shape]
    return any(mesh.has_letter(size) or size == mesh.rows for size in sizes)
