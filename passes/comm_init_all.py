"""Begin the talk of ranks that one process runs."""

from dataclasses import dataclass, replace

from jaxfleet.ir import Attrs, Operator, Program
from jaxfleet.passes import _ranks as ranks
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("comm_init_all")
@dataclass(frozen=True)
class CommInitAll(Pass):
    """Joins all devices of one process, at the end of what the startup program does.

    Nobody has to be waited for, and no state has to travel: one process made it.

    Before::

        program startup
          param w: f32[3]
          block 0
            forward
              Out=w = fill_constant() {shape=[3], value=1.0}

    After::

        program startup {nranks=2, rank=0, role="collective"}
          param w: f32[3]
          block 0
            forward
              Out=w = fill_constant() {shape=[3], value=1.0}
              c_comm_init_all() {ring_id=0}
    """

    nranks: int = 2
    rank: int = 0
    ring_id: int = 0

    def run(self, program: Program) -> Program:
        ranks.check(program, self.name, rank=self.rank, nranks=self.nranks)
        join = made_by(Operator("c_comm_init_all", attrs=Attrs({"ring_id": self.ring_id})), self)
        root = program.root.with_ops([*program.root.ops, join])
        attrs = ranks.facts(program, rank=self.rank, nranks=self.nranks)
        return replace(program.with_block(root), attrs=attrs)
