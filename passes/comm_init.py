"""Begin a rank's startup program's talk with the others: a communicator for every ring."""

from dataclasses import dataclass, replace

from jaxfleet.errors import PassError
from jaxfleet.ir import Attrs, Kind, Operands, Operator, Program, Variable
from jaxfleet.ir.types import RAW
from jaxfleet.passes import _ranks as ranks
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("comm_init")
@dataclass(frozen=True)
class CommInit(Pass):
    """Joins a rank to every ring, at the end of what the startup program does.

    Each ring has an id, which rank 0 makes and the others fetch from it, and a communicator made of
    that id. The mesh of devices is the communicator here, so the operators compute nothing; they
    say who takes part.

    Before::

        program startup
          param w: f32[3]
          block 0
            forward
              Out=w = fill_constant() {shape=[3], value=1.0}

    After::

        program startup {nranks=2, rank=0, role="collective"}
          param w: f32[3]
          state nccl_id_0: raw[]
          block 0
            forward
              Out=w = fill_constant() {shape=[3], value=1.0}
              Out=nccl_id_0 = c_gen_nccl_id() {endpoint="127.0.0.1:6170", other_endpoints=["127.0.0.1:6171"], rank=0}
              c_comm_init(X=nccl_id_0) {nranks=2, rank=0, ring_id=0}
    """  # noqa: E501  # an operator stands on one line

    endpoints: tuple[str, ...] = ("127.0.0.1:6170", "127.0.0.1:6171")  # of all ranks, in order
    current: str = "127.0.0.1:6170"  # this rank's
    rank: int = 0
    ids: tuple[str, ...] = ("nccl_id_0",)  # one for each ring

    def run(self, program: Program) -> Program:
        nranks = len(self.endpoints)
        ranks.check(program, self.name, rank=self.rank, nranks=nranks)
        if self.current not in self.endpoints:
            what = f"{self.name}: current is {self.current}, which no rank's endpoint is"
            raise PassError(what, hint=f"the ranks' are {', '.join(self.endpoints)}")
        ops = [op for ring, name in enumerate(self.ids) for op in self._joins(ring, name)]
        root = program.root.with_ops([*program.root.ops, *(made_by(op, self) for op in ops)])
        made = {name: Variable(name, RAW, (), Kind.STATE) for name in self.ids}
        attrs = ranks.facts(program, rank=self.rank, nranks=nranks)
        variables = {**program.variables, **made}
        return replace(program.with_block(root), variables=variables, attrs=attrs)

    def _joins(self, ring: int, name: str) -> tuple[Operator, Operator]:
        others = tuple(endpoint for endpoint in self.endpoints if endpoint != self.current)
        found = Attrs({"rank": self.rank, "endpoint": self.current, "other_endpoints": others})
        known = Attrs({"nranks": len(self.endpoints), "rank": self.rank, "ring_id": ring})
        return (
            Operator("c_gen_nccl_id", outputs=Operands.named(Out=name), attrs=found),
            Operator("c_comm_init", Operands.named(X=name), attrs=known),
        )
