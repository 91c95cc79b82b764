"""Begin the talk of ranks that one process runs."""

from dataclasses import dataclass

from jaxfleet.errors import PassError
from jaxfleet.ir import Attrs, Operator, Program
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("comm_init_all")
@dataclass(frozen=True)
class CommInitAll(Pass):
    """Joins all devices of one process, at the end of what the startup program does.

    Nobody has to be waited for, and no state has to travel: one process begins, and all its
    devices take what it began with. So the startup program stays a program for one device.

    Before::

        program startup
          param w: f32[3]
          block 0
            forward
              Out=w = fill_constant() {shape=[3], value=1.0}

    After::

        program startup
          param w: f32[3]
          block 0
            forward
              Out=w = fill_constant() {shape=[3], value=1.0}
              c_comm_init_all() {ring_id=0}
    """

    ring_id: int = 0

    def run(self, program: Program) -> Program:
        if any(op.type == "c_comm_init_all" for op in program.root.ops):
            raise PassError(f"{self.name}: the program joins all devices already")
        join = made_by(Operator("c_comm_init_all", attrs=Attrs({"ring_id": self.ring_id})), self)
        return program.with_block(program.root.with_ops([*program.root.ops, join]))
