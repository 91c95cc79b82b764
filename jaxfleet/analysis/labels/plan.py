"""What inference decides: how every operator of a program runs on the devices."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jaxfleet.analysis.labels.label import Label
from jaxfleet.analysis.labels.placing import Placing
from jaxfleet.ir import Operator

Key = tuple[int, int, int]  # block, place of the operator (-1 for an argument), output number


@dataclass(slots=True)
class OpPlan:
    """How one operator runs.

    Attributes:
        labels: how its inputs lie when it is reached.
        placing: how they must lie, and how its outputs then lie.
        outputs: how its outputs lie once those in `completed` are.
        completed: output number to how it is completed right after the operator.
        zeros: which inputs are zero whatever the data, and so a summand for nothing.
    """

    labels: tuple[Label, ...]
    placing: Placing
    outputs: tuple[Label, ...]
    completed: Mapping[int, str]
    zeros: frozenset[int]


@dataclass(slots=True)
class BlockPlan:
    """How one block runs.

    Attributes:
        args: how its arguments lie.
        ops: a plan for each operator.
        found: how its results lie when its operators are done.
        results: how they must lie.
        zeros: which results are zero whatever the data.
        final: how each variable lies at the end.
    """

    args: tuple[Label, ...]
    ops: list[OpPlan] = field(default_factory=list)
    found: tuple[Label, ...] = ()
    results: tuple[Label, ...] = ()
    zeros: frozenset[int] = frozenset()
    final: dict[str, Label] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """How a whole program runs.

    Attributes:
        blocks: by index.
        notes: operators that run on gathered rows, or otherwise not as one would hope, and why.
    """

    blocks: Mapping[int, BlockPlan]
    notes: tuple[tuple[Operator, str], ...]

    def completions(self) -> Iterator[tuple[int, int, str]]:
        """Yields block, place and kind of every completion, in order."""
        for index, block in sorted(self.blocks.items()):
            for place, op in enumerate(block.ops):
                for how in op.completed.values():
                    yield index, place, how
