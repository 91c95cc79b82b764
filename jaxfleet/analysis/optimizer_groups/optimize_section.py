"""The optimize section of a step, its graph of values, and dependencies through sub-blocks.

A value is the content of a variable from one write to the next: state is updated in place, values
are not. Operators outside the section (forward, backward, the completion of gradients) are not in
the graph; their results enter it from outside.

`optax.MultiSteps` is one `cond` over all parameters, and each of its results depends on few of its
operands. For other operators with sub-blocks (loops, recomputation) every result is assumed to
depend on every operand.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from jaxfleet.analysis.flow import OuterUses
from jaxfleet.ir import Block, Kind, Operator, Program, Role, Variable, grad_name

COND = "jax.cond"


class SubblockDeps:
    """Dependencies of the results of a program's operators; bits stand for operands."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._of_blocks: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._makers: dict[int, dict[str, tuple[int, int]] | None] = {}
        self._uses = OuterUses(program)

    def reads(self, op: Operator) -> tuple[int, ...]:
        """Returns, for each output, the operands that it depends on, as bits."""
        if not self.can_narrow(op):
            return ((1 << len(op.inputs)) - 1,) * len(op.writes)
        if op.blocks not in self._of_blocks:
            branches = [self.results(self.program.blocks[index]) for index in op.blocks]
            masks = [union(found) for found in zip(*branches, strict=True)]
            self._of_blocks[op.blocks] = tuple(mask << 1 | 1 for mask in masks)
        return self._of_blocks[op.blocks]

    def can_narrow(self, op: Operator) -> bool:
        """Whether an operator can be copied for some of its results alone."""
        if op.type != COND or self.outer_reads(op) or self.outer_writes(op):
            return False
        return all(self.makers(index) is not None for index in op.blocks)

    def makers(self, index: int) -> dict[str, tuple[int, int]] | None:
        """Returns the operator and the output that make each variable of a block.

        None for a block that writes a variable twice: nothing can be extracted from it.
        """
        if index not in self._makers:
            block = self.program.blocks[index]
            found: dict[str, tuple[int, int]] = {}
            for place, op in enumerate(block.ops):
                found.update({name: (place, output) for output, name in enumerate(op.writes)})
            is_once = len(found) == sum(len(op.writes) for op in block.ops)
            can = is_once and found.keys().isdisjoint(block.args)
            self._makers[index] = found if can else None
        return self._makers[index]

    def results(self, block: Block) -> list[int]:
        """Returns, for each result of a block, the arguments that it depends on, as bits."""
        masks = {name: 1 << place for place, name in enumerate(block.args)}
        self.spread(block, masks)
        return [masks.get(result, 0) if isinstance(result, str) else 0 for result in block.results]

    def spread(self, block: Block, masks: dict[str, int]) -> None:
        """Adds the dependencies of every variable of a block, given the masks of its arguments."""
        for op in block.ops:
            inputs = [masks.get(x, 0) if isinstance(x, str) else 0 for x in op.inputs]
            for name, bits in zip(op.writes, self.reads(op), strict=True):
                masks[name] = union(inputs[place] for place in set_bits(bits))

    def outer_reads(self, op: Operator) -> list[str]:
        """Returns the variables around them that an operator's sub-blocks read."""
        if not op.blocks:
            return []
        names = set[str]().union(*(self._uses.of_block(index).reads for index in op.blocks))
        return sorted(name for name in names if not self._is_const(name))

    def outer_writes(self, op: Operator) -> list[str]:
        """Returns the variables around them that an operator's sub-blocks write."""
        if not op.blocks:
            return []
        return sorted(set().union(*(self._uses.of_block(index).writes for index in op.blocks)))

    def _is_const(self, name: str) -> bool:
        variable = self.program.variables.get(name)
        return variable is not None and variable.kind is Kind.CONST


def set_bits(mask: int) -> Iterator[int]:
    """Yields the positions of a mask's bits, the lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def union(masks: Iterable[int]) -> int:
    """Returns the bit positions set in any of the masks."""
    found = 0
    for mask in masks:
        found |= mask
    return found


OPTIMIZE_ROLES = frozenset({Role.OPTIMIZE, Role.LR_SCHED, Role.OPTIMIZE_LR_SCHED})


def optimize_section(program: Program, inner: SubblockDeps) -> frozenset[int]:
    """Returns the places, in block 0, of the operators of the optimize section.

    They have the optimizer's roles. In a step with two optimizers the second one's loss may depend
    on the first one's update (a GAN), and then the first one's update has the roles of operators
    before a gradient; so an operator between a parameter and its gradients that reads no data is
    also part of the section.
    """
    by_role = {at for at, op in enumerate(program.root.ops) if op.role in OPTIMIZE_ROLES}
    written = {name for at in by_role for name in program.root.ops[at].writes}
    roots = {v.name for v in program.of_kind(Kind.PARAM)} - written
    fed = _fed(program, inner)
    state = {v.name for v in program.of_kind(Kind.STATE)}
    while True:
        found, needed = _updates(program, inner, roots, fed)
        more = (needed & state) - written - roots
        if not more:
            return frozenset(by_role | found)
        roots |= more


def gradients_of(program: Program) -> dict[str, str]:
    """Returns the gradients that a program makes or is fed, with their parameters."""
    fed = [v.name for v in program.of_kind(Kind.PARAM) if grad_name(v.name) in program.variables]
    found = {grad_name(name): name for name in fed}
    for op in program.root.ops:
        found.update({gradient: param for param, gradient in op.role_var if gradient in op.writes})
    return found


def _fed(program: Program, inner: SubblockDeps) -> set[int]:
    """Returns the operators that depend on data other than through a gradient."""
    gradients = gradients_of(program)
    names = {v.name for v in program.of_kind(Kind.DATA)} - gradients.keys()
    places: set[int] = set()
    for at, op in enumerate(program.root.ops):
        reads, writes = _uses(op, inner)
        if names.isdisjoint(reads):
            names -= writes
        else:
            places.add(at)
            names |= writes - gradients.keys()
    return places


def _updates(
    program: Program, inner: SubblockDeps, roots: set[str], fed: set[int]
) -> tuple[set[int], set[str]]:
    """Returns the operators that make the roots, and the variables that these start from."""
    gradients, needed = gradients_of(program), set(roots)
    places: set[int] = set()
    for at in reversed(range(len(program.root.ops))):
        reads, writes = _uses(program.root.ops[at], inner)
        if needed.isdisjoint(writes):
            continue
        needed -= writes
        if at not in fed:
            places.add(at)
            needed |= reads - gradients.keys()
    return places, needed


def _uses(op: Operator, inner: SubblockDeps) -> tuple[set[str], set[str]]:
    reads = {*op.reads, *inner.outer_reads(op)}
    return reads, {*op.writes, *inner.outer_writes(op)}


@dataclass(frozen=True, slots=True)
class SectionValue:
    """One value."""

    name: str  # the variable that holds it
    # the operator of block 0 that makes it; -1 if it comes from outside the section
    place: int = -1


@dataclass(frozen=True, slots=True)
class SectionNode:
    """One operator of the section; values are numbers."""

    # the value of each operand, None for a literal; then the reads of sub-blocks
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]  # the value of each result; then the writes of sub-blocks
    reads: tuple[tuple[int, ...], ...]  # for each output, the values that it depends on


@dataclass
class SectionGraph:
    """The optimize section."""

    program: Program
    values: list[SectionValue] = field(default_factory=list)  # by number
    # by the operator's place in block 0, in order
    nodes: dict[int, SectionNode] = field(default_factory=dict)
    # the value of each variable when the section first reads it
    entry: dict[str, int] = field(default_factory=dict)
    final: dict[str, int] = field(default_factory=dict)  # its value at the end of the step

    @classmethod
    def of(cls, program: Program) -> "SectionGraph":
        graph, inner = cls(program), SubblockDeps(program)
        section = optimize_section(program, inner)
        for place, op in enumerate(program.root.ops):
            if place in section:
                graph.nodes[place] = graph._node(place, op, inner)
            else:
                for name in (*op.writes, *inner.outer_writes(op)):
                    graph._write(name, -1)
        return graph

    def variable(self, value: int) -> Variable:
        name = self.values[value].name
        return self.program.root.variables.get(name) or self.program.variables[name]

    def node_of(self, value: int) -> SectionNode | None:
        """Returns the operator that makes a value, or None for one from outside."""
        return self.nodes.get(self.values[value].place)

    def _node(self, place: int, op: Operator, inner: SubblockDeps) -> SectionNode:
        operands = [self._read(x) if isinstance(x, str) else None for x in op.inputs]
        around = [self._read(name) for name in inner.outer_reads(op)]
        outer_writes = inner.outer_writes(op)
        inputs = (*operands, *around)
        everything = tuple(value for value in inputs if value is not None)
        if around or outer_writes:
            reads = [everything] * (len(op.writes) + len(outer_writes))
        else:
            chosen = ([operands[at] for at in set_bits(mask)] for mask in inner.reads(op))
            reads = [tuple(x for x in found if x is not None) for found in chosen]
        outputs = tuple(self._write(name, place) for name in (*op.writes, *outer_writes))
        return SectionNode(inputs, outputs, tuple(reads))

    def _read(self, name: str) -> int:
        if name not in self.final:
            self._write(name, -1)
        return self.final[name]

    def _write(self, name: str, place: int) -> int:
        is_first = name not in self.final or self.values[self.final[name]].place < 0
        self.values.append(SectionValue(name, place))
        self.final[name] = len(self.values) - 1
        if place < 0 and is_first:
            self.entry[name] = self.final[name]
        return self.final[name]
