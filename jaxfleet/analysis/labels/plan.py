"""What inference decides: how every operator of a program runs on the devices."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jaxfleet.analysis.labels.label import Label, Placing
from jaxfleet.ir import Operator

Key = tuple[int, int, int]  # block, place of the operator (-1 for an argument), output number


@dataclass
class OpPlan:
    """How one operator runs.

    Attributes:
        labels: how its inputs lie when it is reached.
        placing: how they must lie, and how its outputs then lie.
        outputs: how its outputs lie once those in `completed` are.
        completed: output number to how it is completed right after the operator.
    """

    labels: tuple[Label, ...]
    placing: Placing
    outputs: tuple[Label, ...]
    completed: dict[int, str] = field(default_factory=dict)

    @property
    def is_unchanged(self) -> bool:
        """Tells whether nothing has to be put before or after the operator."""
        return self.labels == self.placing.inputs and not self.completed


@dataclass
class BlockPlan:
    """How one block runs.

    Attributes:
        args: how its arguments lie.
        ops: a plan for each operator.
        found: how its results lie when its operators are done.
        results: how they must lie.
        final: how each variable lies at the end.
    """

    args: tuple[Label, ...]
    ops: list[OpPlan] = field(default_factory=list)
    found: tuple[Label, ...] = ()
    results: tuple[Label, ...] = ()
    final: dict[str, Label] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """How a whole program runs.

    Attributes:
        blocks: by index.
        zeros: variables that are zero, and so a summand for nothing.
        notes: operators that run on gathered rows, or otherwise not as one would hope, and why.
    """

    blocks: Mapping[int, BlockPlan]
    zeros: frozenset[str]
    notes: tuple[tuple[Operator, str], ...]

    def completions(self) -> Iterator[tuple[int, int, str]]:
        """Yields block, place and kind of every completion, in order."""
        for index, block in sorted(self.blocks.items()):
            for place, op in enumerate(block.ops):
                for how in op.completed.values():
                    yield index, place, how
