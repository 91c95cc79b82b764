"""Let all ranks begin with the parameters of one."""

from dataclasses import dataclass

from jaxfleet.ir import Attrs, Operator, Program, Role, Source
from jaxfleet.passes import _ranks as ranks
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("broadcast_params")
@dataclass(frozen=True)
class BroadcastParams(Pass):
    """Gives every rank the parameters that rank `root` drew.

    Ranks draw their own numbers, and must begin alike to stay alike. Other state begins with
    constants and does not travel. Runs after `comm_init`, which makes the rings.

    Before::

        program startup {nranks=2, rank=0, role="collective"}
          param w: f32[3]
          block 0
            forward
              Out=w = uniform_random() {shape=[3]}

    After::

        program startup {nranks=2, rank=0, role="collective"}
          param w: f32[3]
          block 0
            forward
              Out=w = uniform_random() {shape=[3]}
              Out=w = c_broadcast(X=w) {ring_id=0, root=0, use_calc_stream=false}
              Out=w = c_sync_comm_stream(X=w) {ring_id=0}
    """

    nrings: int = 1
    root: int = 0
    skip: tuple[str, ...] = ()  # parameters of which each rank has rows of its own

    runs_after = ("comm_init",)

    def run(self, program: Program) -> Program:
        rings = ranks.rings(self.nrings, self.name)
        names = [v.name for v in ranks.trained(program, self.skip)]
        if not names:
            return program
        ops = [self._broadcast(name, next(rings)) for name in names]
        ops += ranks.wait_for_communication(names[-1], self.nrings, Role.FORWARD, Source())
        made = [made_by(op, self) for op in ops]
        return program.with_block(program.root.with_ops([*program.root.ops, *made]))

    def _broadcast(self, name: str, ring: int) -> Operator:
        attrs = Attrs({"ring_id": ring, "root": self.root, "use_calc_stream": False})
        return ranks.in_place("c_broadcast", name, attrs, Role.FORWARD, Source())
