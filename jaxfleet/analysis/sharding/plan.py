"""Sharding plans: an operator as its rule sees it, the rule's answer, and the plan of a program."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from jaxfleet.analysis.sharding.spec import (
    REPLICATED,
    SUM,
    VARYING,
    Mesh,
    Sharding,
    completed,
    sharded,
)
from jaxfleet.ir import Attr, Attrs, Block, BlockRef, Operator, Program, Size, Variable


@dataclass(frozen=True, slots=True)
class OperatorView:
    """A sharding rule's view of an operator."""

    op: Operator
    labels: tuple[Sharding, ...]  # the layout of its inputs
    shapes: tuple[tuple[Size, ...], ...]  # its inputs' shapes in the one-device program
    out_shapes: tuple[tuple[Size, ...], ...]  # its outputs' shapes there
    mesh: Mesh
    dtypes: tuple[str, ...]
    out_dtypes: tuple[str, ...]
    zeros: frozenset[int] = frozenset()  # which inputs are zero whatever the data
    # whether its output is needed complete, so that a summand saves nothing
    completes: bool = False
    # which outputs are needed complete, gradients of parameters among them
    needed: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        op: Operator,
        labels: tuple[Sharding, ...],
        mesh: Mesh,
        find: Callable[[str], Variable],
        *,
        zeros: frozenset[int] = frozenset(),
        completes: bool = False,
    ) -> "OperatorView":
        """Returns the view of an operator whose variables a function finds."""
        ins = [find(x) if isinstance(x, str) else x for x in op.inputs]
        outs = [find(x) for x in op.writes]
        return cls(
            op,
            labels,
            tuple([x.shape if isinstance(x, Variable) else () for x in ins]),
            tuple([x.shape for x in outs]),
            mesh,
            tuple([x.dtype for x in ins]),
            tuple([x.dtype for x in outs]),
            zeros,
            completes,
        )

    def ints(self, name: str) -> tuple[int, ...]:
        return as_ints(self.op.attrs[name])

    def number(self, name: str) -> int:
        return int(str(self.op.attrs[name]))

    def axis(self, place: int) -> int | None:
        """Returns the axis an input is cut along, or None."""
        label = self.labels[place]
        return label.axis if label.is_sharded else None

    @property
    def has_rows(self) -> bool:
        """Whether an input is cut."""
        return any(label.is_sharded for label in self.labels)

    @property
    def settled(self) -> Sharding:
        """The label of a result that depends on no rows: varying if an input is."""
        return VARYING if VARYING in self.labels else REPLICATED


@dataclass(frozen=True, slots=True)
class OperatorSharding:
    """How an operator runs on the devices."""

    inputs: tuple[Sharding, ...]  # the required layout of its inputs
    outputs: tuple[Sharding, ...]  # the resulting layout of its outputs
    attrs: Attrs  # its attributes there; sizes are a device's own
    op_type: str = ""  # the operator that replaces it, if any
    note: str = ""  # why it could not run on rows alone, for the user

    def noting(self, note: str) -> "OperatorSharding":
        return replace(self, note=note)


def as_ints(value: Attr) -> tuple[int, ...]:
    """Returns an attribute as a tuple of numbers."""
    assert isinstance(value, tuple)
    return tuple(item for item in value if isinstance(item, int))


def as_sizes(value: Attr) -> list[Size]:
    """Returns an attribute as a list of sizes."""
    assert isinstance(value, tuple)
    return [item for item in value if isinstance(item, Size)]


def gathered(view: OperatorView, note: str) -> OperatorSharding:
    """Runs the operator whole on every device: right for any operator, but expensive."""
    placing = whole(view)
    return placing.noting(note) if view.has_rows else placing


def whole(view: OperatorView) -> OperatorSharding:
    """Runs the operator on complete values."""
    outputs = [view.settled] * len(view.out_shapes)
    return along(view, [completed(label) for label in view.labels], *outputs)


def along(
    view: OperatorView, inputs: Sequence[Sharding], *outputs: Sharding, **attrs: Attr
) -> OperatorSharding:
    """Runs the operator on inputs with its labels.

    Attributes given by keyword are used as they are; sizes in the others become those of the whole.
    """
    rest = view.op.attrs.without(*attrs) if attrs else view.op.attrs
    rest = view.mesh.full_attrs(rest)
    return OperatorSharding(tuple(inputs), outputs, rest.updated(**attrs) if attrs else rest)


def local_sizes(view: OperatorView, shape: Sequence[Size], axis: int) -> tuple[Size, ...]:
    """Returns a shape with a device's part on one axis."""
    return view.mesh.local_shape(shape, sharded(axis))


SCATTER = "scatter"  # completes a sum of which each device keeps its rows


@dataclass(frozen=True)
class StateSharding:
    """The layout of state at the start and at the end of a step."""

    # its labels other than `REPLICATED`: rows of a leaf that is cut over the devices, a summand or
    # a device's own value
    state: Mapping[str, Sharding] = field(default_factory=dict)
    # those of which each device receives only its rows, with the axis
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
    """How one operator runs."""

    labels: tuple[Sharding, ...]  # the layout of its inputs when it is reached
    placing: OperatorSharding  # their required layout, and the resulting layout of its outputs
    outputs: tuple[Sharding, ...]  # the layout of its outputs after completion
    # the kind of completion right after the operator, by output number
    completed: Mapping[int, str]
    # which inputs are zero whatever the data, and so count as summands at no cost
    zeros: frozenset[int]


@dataclass(slots=True)
class BlockPlan:
    """How one block runs."""

    args: tuple[Sharding, ...]
    ops: list[OpPlan] = field(default_factory=list)
    found: tuple[Sharding, ...] = ()  # the layout of its results after its operators
    results: tuple[Sharding, ...] = ()  # their required layout
    zeros: frozenset[int] = frozenset()  # which results are zero whatever the data
    # the layout of each variable at the end
    final: dict[str, Sharding] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardingPlan:
    """How a whole program runs."""

    blocks: Mapping[int, BlockPlan]  # by index
    # operators that run on gathered rows or are otherwise inefficient, with the reason
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
    ) -> BlockPlan: ...
    def run_alone(self, block: Block) -> None: ...
    def is_completed_arg(self, block: Block, place: int) -> bool: ...


def block_at(planner: PropagationContext, view: OperatorView, name: str) -> Block:
    """Returns the sub-block that an attribute names."""
    ref = view.op.attrs[name]
    assert isinstance(ref, BlockRef)
    return planner.program.blocks[ref.index]


def blocks_of(planner: PropagationContext, view: OperatorView) -> list[Block]:
    """Returns all sub-blocks of an operator."""
    return [planner.program.blocks[index] for index in view.op.blocks]
