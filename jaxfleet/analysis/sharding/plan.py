"""Sharding plans: the shardings of state, operators and blocks that propagation decides."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxfleet.analysis.sharding.rule_api import OperatorSharding, OperatorView
from jaxfleet.analysis.sharding.spec import REPLICATED, SUM, Mesh, Sharding
from jaxfleet.ir import Block, BlockRef, Operator, Program

SCATTER = "scatter"  # completes a sum of which each device keeps its rows


@dataclass(frozen=True)
class StateSharding:
    """The layout of state at the start and at the end of a step.

    Attributes:
        state: its labels other than `REPLICATED`: rows of a leaf that is cut over the devices, a
            summand or a device's own value.
        gradients: those of which each device receives only its rows, with the axis.
    """

    state: Mapping[str, Sharding] = field(default_factory=dict)
    gradients: Mapping[str, int] = field(default_factory=dict)

    def label(self, name: str) -> Sharding:
        return self.state.get(name, REPLICATED)


def own_state(program: Program) -> tuple[str, ...]:
    """Returns the state of which every device has a value of its own."""
    names = program.attrs.get("own", ())
    assert isinstance(names, tuple)
    return tuple(map(str, names))


def summed_state(program: Program) -> StateSharding:
    """Returns the layout of a one-device program's state: `sums` names the accumulators in it.

    Each device adds up its own summands; readers complete the sum.
    """
    names = program.attrs.get("sums", ())
    assert isinstance(names, tuple)
    return StateSharding({str(name): SUM for name in names})


OutputKey = tuple[int, int, int]  # block, place of the operator (-1 for an argument), output number


@dataclass(slots=True)
class OpPlan:
    """How one operator runs.

    Attributes:
        labels: the layout of its inputs when it is reached.
        placing: their required layout, and the resulting layout of its outputs.
        outputs: the layout of its outputs after completion.
        completed: the kind of completion right after the operator, by output number.
        zeros: which inputs are zero whatever the data, and so count as summands at no cost.
    """

    labels: tuple[Sharding, ...]
    placing: OperatorSharding
    outputs: tuple[Sharding, ...]
    completed: Mapping[int, str]
    zeros: frozenset[int]


@dataclass(slots=True)
class BlockPlan:
    """How one block runs.

    Attributes:
        args: the layout of its arguments.
        ops: a plan for each operator.
        found: the layout of its results after its operators.
        results: their required layout.
        zeros: which results are zero whatever the data.
        final: the layout of each variable at the end.
    """

    args: tuple[Sharding, ...]
    ops: list[OpPlan] = field(default_factory=list)
    found: tuple[Sharding, ...] = ()
    results: tuple[Sharding, ...] = ()
    zeros: frozenset[int] = frozenset()
    final: dict[str, Sharding] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardingPlan:
    """How a whole program runs.

    Attributes:
        blocks: by index.
        notes: operators that run on gathered rows or are otherwise inefficient, with the reason.
    """

    blocks: Mapping[int, BlockPlan]
    notes: tuple[tuple[Operator, str], ...]

    @property
    def divides(self) -> bool:
        """Whether any operator computes with a device's own rows."""
        plans = (op for block in self.blocks.values() for op in block.ops)
        return any(label.is_sharded for op in plans for label in op.placing.inputs)

    def completions(self) -> Iterator[tuple[int, int, str]]:
        """Yields block, place and kind of every completion, in order."""
        for index, block in sorted(self.blocks.items()):
            for place, op in enumerate(block.ops):
                for how in op.completed.values():
                    yield index, place, how


class PropagationContext(Protocol):
    """The interface of propagation for control flow."""

    program: Program
    mesh: Mesh

    def enter(
        self, block: Block, args: Sequence[Sharding], results: Sequence[Sharding] | None = None
    ) -> BlockPlan:
        """Plans a block that is a function."""
        ...

    def run_alone(self, block: Block) -> None:
        """Plans a block that every device runs by itself, on any inputs."""
        ...

    def is_completed_arg(self, block: Block, place: int) -> bool:
        """Whether a block needs an argument complete."""
        ...


def block_at(planner: PropagationContext, view: OperatorView, name: str) -> Block:
    """Returns the sub-block that an attribute names."""
    ref = view.op.attrs[name]
    assert isinstance(ref, BlockRef)
    return planner.program.blocks[ref.index]


def blocks_of(planner: PropagationContext, view: OperatorView) -> list[Block]:
    """Returns all sub-blocks of an operator."""
    return [planner.program.blocks[index] for index in view.op.blocks]
