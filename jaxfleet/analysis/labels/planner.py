"""What rules for operators with sub-blocks ask of the inference, and how they read operators."""

from collections.abc import Sequence
from typing import Protocol

from jaxfleet.analysis.labels.label import Label
from jaxfleet.analysis.labels.mesh import Mesh
from jaxfleet.analysis.labels.placing import View
from jaxfleet.analysis.labels.plan import BlockPlan
from jaxfleet.ir import Block, BlockRef, Program


class Planner(Protocol):
    """What control flow needs of the inference."""

    program: Program
    mesh: Mesh

    def enter(
        self, block: Block, args: Sequence[Label], results: Sequence[Label] | None = None
    ) -> BlockPlan:
        """Plans a block that is a function."""
        ...

    def run_alone(self, block: Block) -> None:
        """Plans a block that every device runs by itself, on whatever it is given."""
        ...

    def is_completed_arg(self, block: Block, place: int) -> bool:
        """Tells whether a block needs an argument complete."""
        ...


def block_at(planner: Planner, view: View, name: str) -> Block:
    """Returns the sub-block that an attribute names."""
    ref = view.op.attrs[name]
    assert isinstance(ref, BlockRef)
    return planner.program.blocks[ref.index]


def blocks_of(planner: Planner, view: View) -> list[Block]:
    """Returns all sub-blocks of an operator."""
    return [planner.program.blocks[index] for index in view.op.blocks]
