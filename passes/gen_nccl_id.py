"""Say in a startup program which processes train together: fluid's nccl2 mode."""

from dataclasses import dataclass, replace

from jaxfleet.errors import PassError
from jaxfleet.ir import Attrs, Kind, Operands, Operator, Program, Variable
from jaxfleet.ir.types import RAW
from jaxfleet.passes import _ranks as ranks
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("gen_nccl_id")
@dataclass(frozen=True)
class GenNcclId(Pass):
    """Adds the operator that tells all trainers' processes of each other.

    The step is not rewritten here: the executor that runs it on several devices sums gradients
    over all trainers' devices. A hierarchical sum goes first over `inner` trainers of a machine,
    then over machines; each level and each ring has a handle of its own.

    Before::

        program startup
          param w: f32[3]
          block 0
            forward
              Out=w = fill_constant() {shape=[3], value=1.0}

    After::

        program startup
          param w: f32[3]
          state NCCLID: raw[]
          block 0
            forward
              Out=w = fill_constant() {shape=[3], value=1.0}
              NCCLID=NCCLID = gen_nccl_id() {hierarchical_allreduce_inter_nranks=0, nccl_comm_num=1, trainer_id=0, trainers=["127.0.0.1:6170", "127.0.0.1:6171"], use_hierarchical_allreduce=false}
    """  # noqa: E501  # an operator stands on one line

    trainers: tuple[str, ...] = ("127.0.0.1:6170", "127.0.0.1:6171")  # host:port of each
    trainer_id: int = 0
    rings: int = 1
    hierarchical: bool = False
    inner: int = 0  # trainers of one machine, where sums are hierarchical

    def run(self, program: Program) -> Program:
        ranks.check(program, self.name, rank=self.trainer_id, nranks=len(self.trainers))
        if any(op.type == "gen_nccl_id" for op in program.root.ops):
            raise PassError(f"{self.name}: the program knows its trainers already")
        if self.rings < 1:
            raise PassError(f"{self.name}: {self.rings} rings")
        handles = [Variable(name, RAW, (), Kind.STATE) for name in self._handles()]
        tell = Operator("gen_nccl_id", outputs=Operands.named(NCCLID=handles[0].name))
        tell = made_by(replace(tell, attrs=self._attrs()), self)
        variables = {**program.variables, **{v.name: v for v in handles}}
        block = program.root.with_ops([*program.root.ops, tell])
        return replace(program.with_block(block), variables=variables)

    def _handles(self) -> list[str]:
        names = ["NCCLID", *(f"NCCLID_{ring}" for ring in range(1, self.rings))]
        if self.hierarchical:
            for ring in range(self.rings):
                names += [f"Hierarchical_{level}_NCCLID_{ring}" for level in ("inter", "exter")]
        return names

    def _attrs(self) -> Attrs:
        return Attrs(
            {
                "trainers": self.trainers,
                "trainer_id": self.trainer_id,
                "nccl_comm_num": self.rings,
                "use_hierarchical_allreduce": self.hierarchical,
                "hierarchical_allreduce_inter_nranks": self.inner,
            }
        )
