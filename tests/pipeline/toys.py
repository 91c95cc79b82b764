"""Passes for tests of pipelines, and a program for them. Registered only on request."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxfleet.errors import PassError
from jaxfleet.ir import Operands, Operator, Program, Role, Source, Variable, parse
from jaxfleet.pipeline import Pass, made_by

TOY = parse("""
program toy
  data  x: f32[b,4]
  param w: f32[4]
  block 0
    forward
      h: f32[b,4] = jax.mul(x, w)  # model/train.py:7, in step
      fetch(h)
""")


@dataclass(frozen=True)
class Nothing(Pass):
    """Does nothing."""

    def run(self, program: Program) -> Program:
        return program


@dataclass(frozen=True)
class AddCopies(Pass):
    """Appends copies of h, each made by this pass."""

    count: int = 1

    def run(self, program: Program) -> Program:
        block = program.root
        names = [f"copy{len(block.ops)}_{number}" for number in range(self.count)]
        source = Source("model/train.py", 7, "step")
        copies = [
            Operator("c_copy", Operands.of("h"), Operands.of(name), role=Role.DIST, source=source)
            for name in names
        ]
        declare = [replace(block.variables["h"], name=name) for name in names]
        ops = (*block.ops, *(made_by(op, self) for op in copies))
        return program.with_block(block.with_ops(ops, declare=declare))


@dataclass(frozen=True)
class ForgetDeclarations(Pass):
    """Returns a broken program: nothing in block 0 is declared any longer."""

    def run(self, program: Program) -> Program:
        return program.with_block(replace(program.root, variables=dict[str, Variable]()))


@dataclass(frozen=True)
class Refuse(Pass):
    """Raises."""

    def run(self, program: Program) -> Program:
        raise PassError(f"refuse: '{program.name}' is refused")


@dataclass(frozen=True)
class Late(Nothing):
    """Runs after add_copies."""

    runs_after = ("add_copies",)


@dataclass(frozen=True)
class Many(Nothing):
    """Has an option of every type."""

    an_int: int = 1
    a_float: float = 0.5
    a_bool: bool = False
    a_str: str = "plain"
    a_tuple: tuple[int, ...] = ()
    a_pair: tuple[str, float] = ("a", 1.0)
    an_optional: int | None = None


@dataclass(frozen=True)
class Needy(Nothing):
    """Has an option without a default."""

    endpoints: tuple[str, ...]


TOY_PASSES: Mapping[str, type[Pass]] = {
    "nothing": Nothing,
    "add_copies": AddCopies,
    "forget": ForgetDeclarations,
    "refuse": Refuse,
    "late": Late,
    "many": Many,
    "needy": Needy,
}
