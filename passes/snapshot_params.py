"""Remember what all ranks begin with: the startup side of `local_sgd`."""

from dataclasses import dataclass, replace

from jaxfleet.ir import Attrs, Kind, Operands, Operator, Program, Variable
from jaxfleet.ir.names import LOCAL_STEPS, snapshot_name
from jaxfleet.passes import _ranks as ranks
from jaxfleet.pipeline import Pass, made_by, register_pass


@register_pass("snapshot_params")
@dataclass(frozen=True)
class SnapshotParams(Pass):
    """Copies every parameter to its snapshot, from which `local_sgd` measures how far ranks went.

    Runs after `broadcast_params`, since all ranks' snapshots must be the same.

    Before::

        program startup {nranks=2, rank=0, role="collective"}
          param w: f32[3]
          block 0
            forward
              Out=w = fill_constant() {shape=[3], value=1.0}

    After::

        program startup {nranks=2, rank=0, role="collective"}
          param w: f32[3]
          state w@SNAPSHOT: f32[3]
          block 0
            forward
              Out=w = fill_constant() {shape=[3], value=1.0}
              Out=w@SNAPSHOT = assign(X=w)
    """

    every: int = 1  # as `local_sgd` has it: above 1 it counts steps, from 0
    skip: tuple[str, ...] = ()  # parameters of which each rank has rows of its own

    runs_after = ("broadcast_params",)

    def run(self, program: Program) -> Program:
        params = ranks.trained(program, self.skip)
        made = {p.name: replace(p, name=snapshot_name(p.name), kind=Kind.STATE) for p in params}
        ops = [
            Operator("assign", Operands.named(X=name), Operands.named(Out=snapshot.name))
            for name, snapshot in made.items()
        ]
        new = list(made.values())
        if self.every > 1:
            attrs = Attrs({"dtype": "int32", "shape": (1,), "value": 0})
            ops.append(
                Operator("fill_constant", outputs=Operands.named(Out=LOCAL_STEPS), attrs=attrs)
            )
            new.append(Variable(LOCAL_STEPS, "i32", (1,), Kind.STATE))
        variables = {**program.variables, **{v.name: v for v in new}}
        block = program.root.with_ops([*program.root.ops, *(made_by(op, self) for op in ops)])
        return replace(program.with_block(block), variables=variables)
