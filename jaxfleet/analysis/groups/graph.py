"""The optimize section as a graph of values: state is updated in place, values are not.

A value is what a variable holds from one write to the next. Operators outside the section (forward,
backward, what completes gradients) are not in the graph; what they write comes from outside.
"""

from dataclasses import dataclass, field

from jaxfleet.analysis.groups.inner import Inner, places_of
from jaxfleet.analysis.groups.section import optimize_section
from jaxfleet.ir import Operator, Program, Variable


@dataclass(frozen=True, slots=True)
class Value:
    """One value.

    Attributes:
        name: the variable that holds it.
        place: the operator of block 0 that makes it; -1 where it comes from outside the section.
    """

    name: str
    place: int = -1


@dataclass(frozen=True, slots=True)
class Node:
    """One operator of the section; values go by their numbers.

    Attributes:
        inputs: the value of each operand, None for a literal; then what sub-blocks read.
        outputs: the value of each result; then what sub-blocks write.
        reads: for each output, the values that it depends on.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]


@dataclass
class Graph:
    """The optimize section.

    Attributes:
        program: the whole program.
        values: by number.
        nodes: by the operator's place in block 0, in order.
        entry: what a variable holds when the section first sees it.
        final: what it holds at the end of the step.
    """

    program: Program
    values: list[Value] = field(default_factory=list)
    nodes: dict[int, Node] = field(default_factory=dict)
    entry: dict[str, int] = field(default_factory=dict)
    final: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program) -> "Graph":
        """Reads the section of a program."""
        graph, inner = cls(program), Inner(program)
        section = optimize_section(program, inner)
        for place, op in enumerate(program.root.ops):
            if place in section:
                graph.nodes[place] = graph._node(place, op, inner)
            else:
                for name in (*op.writes, *inner.outer_writes(op)):
                    graph._write(name, -1)
        return graph

    def variable(self, value: int) -> Variable:
        """Returns the variable that holds a value."""
        name = self.values[value].name
        return self.program.root.variables.get(name) or self.program.variables[name]

    def node_of(self, value: int) -> Node | None:
        """Returns the operator that makes a value, or None for one from outside."""
        return self.nodes.get(self.values[value].place)

    def _node(self, place: int, op: Operator, inner: Inner) -> Node:
        operands = [self._read(x) if isinstance(x, str) else None for x in op.inputs]
        around = [self._read(name) for name in inner.outer_reads(op)]
        outer_writes = inner.outer_writes(op)
        inputs = (*operands, *around)
        everything = tuple(value for value in inputs if value is not None)
        if around or outer_writes:
            reads = [everything] * (len(op.writes) + len(outer_writes))
        else:
            chosen = ([operands[at] for at in places_of(mask)] for mask in inner.reads(op))
            reads = [tuple(x for x in found if x is not None) for found in chosen]
        outputs = tuple(self._write(name, place) for name in (*op.writes, *outer_writes))
        return Node(inputs, outputs, tuple(reads))

    def _read(self, name: str) -> int:
        if name not in self.final:
            self._write(name, -1)
        return self.final[name]

    def _write(self, name: str, place: int) -> int:
        is_first = name not in self.final or self.values[self.final[name]].place < 0
        self.values.append(Value(name, place))
        self.final[name] = len(self.values) - 1
        if place < 0 and is_first:
            self.entry[name] = self.final[name]
        return self.final[name]
