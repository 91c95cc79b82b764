"""Takes the operators of one group out of a step, as a program of their own."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.groups.copier import Copier
from jaxfleet.analysis.groups.graph import Graph
from jaxfleet.analysis.groups.inner import Inner
from jaxfleet.ir import Block, Kind, Operand, Operands, Operator, Program, Role, Variable
from jaxfleet.ir.names import unique


@dataclass(frozen=True)
class Extracted:
    """Some operators as a program.

    Attributes:
        program: it.
        sources: the value of the graph that each variable fed to it stands for.
    """

    program: Program
    sources: Mapping[str, int]


def extract(
    graph: Graph,
    inner: Inner,
    places: Sequence[int],
    *,
    own: Sequence[str],
    fetched: Sequence[int] = (),
    name: str,
) -> "Extracted":
    """Takes some operators of the optimize section as a program.

    What they read and none of them makes is data, but for what is their own. A variable keeps its
    name; where two of its values come from outside, the second gets another.

    Args:
        graph: the section.
        inner: of the same program.
        places: the operators, in order.
        own: the parameters and state leaves that they update, or that only they read.
        fetched: values that they make and others need.
        name: of the result.
    """
    top = {leaf: graph.program.variables[leaf] for leaf in own}
    return _Extraction(graph, inner, top.keys(), dict(top)).run(places, fetched, name)


@dataclass
class _Extraction:
    graph: Graph
    inner: Inner
    own: Collection[str]
    top: dict[str, Variable]
    names: dict[int, str] = field(default_factory=dict)  # by value
    taken: set[str] = field(default_factory=set)
    temporaries: dict[str, Variable] = field(default_factory=dict)

    def run(self, places: Sequence[int], fetched: Sequence[int], name: str) -> Extracted:
        self.taken = set(self.own)
        copier = Copier(self.inner, [Block()])
        ops = [self._op(place, copier) for place in places]
        if fetched:
            parts = Operands.of(*(self.names[value] for value in fetched))
            ops.append(Operator("fetch", parts, role=Role.OPTIMIZE))
        self._declare_constants(copier.blocks[1:])
        root = Block(variables=self.temporaries, ops=tuple(ops))
        program = Program(name, self.top, (root, *copier.blocks[1:]))
        values = {name: value for value, name in self.names.items()}
        fed = {v.name: values[v.name] for v in program.of_kind(Kind.DATA)}
        return Extracted(program, fed)

    def _op(self, place: int, copier: Copier) -> Operator:
        op, node = self.graph.program.root.ops[place], self.graph.nodes[place]
        inputs: list[Operand] = [
            x if value is None else self._read(value)
            for x, value in zip(op.inputs, node.inputs, strict=False)
        ]
        for value in node.inputs[len(op.inputs) :]:
            assert value is not None
            self._read(value)
        outputs = [self._write(value) for value in node.outputs]
        copied = copier.copy(op)
        return replace(
            copied,
            inputs=op.inputs.replaced(inputs),
            outputs=op.outputs.replaced(outputs[: len(op.outputs)]),
            role_var=(),
        )

    def _read(self, value: int) -> str:
        if value not in self.names:
            variable = self.graph.variable(value)
            name = self.names[value] = self._name(value)
            if variable.kind is not Kind.CONST and name not in self.own:
                variable = replace(variable, kind=Kind.DATA)
            self.top.setdefault(name, replace(variable, name=name))
        return self.names[value]

    def _write(self, value: int) -> str:
        name = self.names[value] = self._name(value)
        if name not in self.own:
            kept = replace(self.graph.variable(value), name=name, kind=Kind.TEMP)
            self.temporaries[name] = kept
        return name

    def _name(self, value: int) -> str:
        name = self.graph.values[value].name
        if name in self.own:
            return name
        name = unique(name, self.taken)
        self.taken.add(name)
        return name

    def _declare_constants(self, blocks: Sequence[Block]) -> None:
        """Declares the constants that sub-blocks read."""
        variables = self.graph.program.variables
        read = {name for block in blocks for op in block.ops for name in op.reads}
        read |= {x for block in blocks for x in block.results if isinstance(x, str)}
        for name in sorted(read & variables.keys()):
            if variables[name].kind is Kind.CONST:
                self.top.setdefault(name, variables[name])
