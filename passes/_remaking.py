"""Remembers what a block makes of nothing but shapes and what every device has."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxfleet.analysis.labels import Label, Mesh, Placing, View
from jaxfleet.analysis.labels.remake import REMADE, remade
from jaxfleet.ir import Block, Operand, Operands, Operator, Program, Variable


@dataclass(frozen=True)
class _Recipe:
    """How a value was made: its operator, and what that read."""

    op: Operator
    inputs: Operands
    placing: Placing


@dataclass
class Remaking:
    """Makes broadcasts, counts and random numbers anew where they are needed under another label.

    A broadcast of what every device has costs less than moving its result between devices; where
    nothing reads the first result any longer, it is not made at all.
    """

    program: Program
    block: Block
    mesh: Mesh
    recipes: dict[str, _Recipe] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def note(self, op: Operator, inputs: Operands, placing: Placing) -> None:
        """Remembers how an operator's output is made."""
        if op.type in REMADE:
            self.recipes[op.writes[0]] = _Recipe(op, inputs, placing)

    def forget(self, name: str) -> None:
        """Forgets what was made of a variable's old value."""
        self.recipes.pop(name, None)
        stale = [made for made, recipe in self.recipes.items() if name in recipe.inputs.names]
        for made in stale:
            del self.recipes[made]

    def find(self, operand: Operand, wanted: Label) -> Operator | None:
        """Returns an operator that makes a value under another label; its output is to be set."""
        recipe = self.recipes.get(operand) if isinstance(operand, str) else None
        if recipe is None:
            return None
        placing = remade(self._view(recipe), wanted)
        if placing is None:
            return None
        self.used.add(str(operand))
        op = recipe.op
        return Operator(
            placing.op_type or op.type, recipe.inputs, attrs=placing.attrs, source=op.source
        )

    def without_unread(self, ops: Sequence[Operator], results: Sequence[Operand]) -> list[Operator]:
        """Returns the operators less those whose results were made anew for all that read them."""
        if not self.used:
            return list(ops)
        read = {name for op in ops for name in op.reads}
        # State is read in the next step, and a sub-block may read what is around it.
        read |= {name for b in self.program.blocks for op in b.ops for name in op.reads
                 if b.index != self.block.index} | self.program.variables.keys()  # fmt: skip
        gone = self.used - read - {x for x in results if isinstance(x, str)}
        return [op for op in ops if op.type not in REMADE or op.writes[0] not in gone]

    def _view(self, recipe: _Recipe) -> View:
        def find(name: str) -> Variable:
            return self.program.lookup(name, self.block)

        return View.of(recipe.op, recipe.placing.inputs, self.mesh, find)
