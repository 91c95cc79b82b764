"""Extraction of the operators of one group, with their sub-blocks, as a separate program."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.optimizer_groups.optimize_section import (
    SectionGraph,
    SubblockDeps,
    set_bits,
    union,
)
from jaxfleet.ir import (
    Block,
    Kind,
    Operand,
    Operands,
    Operator,
    Program,
    Role,
    Variable,
)
from jaxfleet.ir.inline import with_block_numbers
from jaxfleet.ir.naming import unique


@dataclass
class NarrowingCopier:
    """Copies operators into a new program, with their sub-blocks, narrowed on request."""

    inner: SubblockDeps  # dependencies of the source program
    blocks: list[Block]  # of the new program; block 0 is the caller's to fill

    def copy(self, op: Operator, outputs: Collection[int] | None = None) -> Operator:
        """Returns a copy of an operator of block 0 whose sub-blocks are among `blocks`.

        Of a `cond` it keeps `outputs`, all by default.
        """
        return self._copy(op, 0, outputs)

    def _copy(self, op: Operator, parent: int, outputs: Collection[int] | None) -> Operator:
        if not op.blocks:
            return op
        if outputs is not None and len(outputs) < len(op.writes) and self.inner.can_narrow(op):
            return self._narrowed(op, parent, sorted(outputs))
        numbers = {index: self._block(index, parent) for index in op.blocks}
        return with_block_numbers(op, numbers.__getitem__)

    def _narrowed(self, op: Operator, parent: int, outputs: Sequence[int]) -> Operator:
        masks = self.inner.reads(op)
        needed = union(masks[output] for output in outputs)
        kept = list(set_bits(needed))
        args = [place - 1 for place in kept[1:]]  # the first operand chooses the branch
        numbers = {
            index: self._block(index, parent, results=outputs, args=args) for index in op.blocks
        }
        narrow = replace(
            op,
            inputs=Operands.of(*(op.inputs[place] for place in kept)),
            outputs=Operands.of(*(op.outputs[place] for place in outputs)),
        )
        return with_block_numbers(narrow, numbers.__getitem__)

    def _block(
        self,
        index: int,
        parent: int,
        *,
        results: Sequence[int] | None = None,
        args: Sequence[int] | None = None,
    ) -> int:
        """Copies a block with the selected results and arguments."""
        block, number = self.inner.program.blocks[index], len(self.blocks)
        self.blocks.append(block)  # its number precedes those of the blocks inside it
        ops: Iterable[tuple[Operator, set[int] | None]]
        if results is None:
            wanted, ops = block.results, ((op, None) for op in block.ops)
        else:
            wanted = tuple(block.results[place] for place in results)
            ops = _needed(block, wanted, self.inner)
        copied = replace(
            block,
            index=number,
            parent=parent,
            ops=tuple(self._copy(op, number, outputs) for op, outputs in ops),
            args=block.args if args is None else tuple(block.args[place] for place in args),
            results=wanted,
        )
        self.blocks[number] = copied if results is None else _with_used_variables(copied)
        return number


def _needed(
    block: Block, results: Iterable[Operand], inner: SubblockDeps
) -> list[tuple[Operator, set[int] | None]]:
    """Returns the operators that some results of a block need, with their needed outputs."""
    makers = inner.makers(block.index)
    assert makers is not None
    needed: dict[int, set[int]] = {}
    left = [name for name in results if isinstance(name, str)]
    while left:
        maker = makers.get(left.pop())
        if maker is None or maker[1] in needed.get(maker[0], ()):
            continue
        place, output = maker
        needed.setdefault(place, set()).add(output)
        op, mask = block.ops[place], inner.reads(block.ops[place])[output]
        operands = (op.inputs[at] for at in set_bits(mask))
        left += [x for x in operands if isinstance(x, str)]
    return [(block.ops[place], needed[place]) for place in sorted(needed)]


def _with_used_variables(block: Block) -> Block:
    """Returns a block without its unused variables, of which there may be many."""
    used = [*block.args, *(name for op in block.ops for name in (*op.reads, *op.writes))]
    used += [x for x in block.results if isinstance(x, str)]
    known = block.variables
    return replace(block, variables={name: known[name] for name in used if name in known})


@dataclass(frozen=True)
class Extracted:
    """Some operators as a program."""

    program: Program
    sources: Mapping[str, int]  # the value of the graph that each variable fed to it represents


def extract(
    graph: SectionGraph,
    inner: SubblockDeps,
    places: Sequence[int],
    *,
    own: Sequence[str],
    fetched: Sequence[int] = (),
    name: str,
) -> "Extracted":
    """Extracts some operators of the optimize section as a program.

    Values read from outside are data, except those in `own`: the parameters and state leaves that
    the operators update, or that only they read. The values in `fetched` are results. A variable
    keeps its name; if two of its values come from outside, the second is renamed.
    """
    top = {leaf: graph.program.variables[leaf] for leaf in own}
    return _Extraction(graph, inner, top.keys(), dict(top)).run(places, fetched, name)


@dataclass
class _Extraction:
    graph: SectionGraph
    inner: SubblockDeps
    own: Collection[str]
    top: dict[str, Variable]
    names: dict[int, str] = field(default_factory=dict)  # by value
    taken: set[str] = field(default_factory=set)
    temporaries: dict[str, Variable] = field(default_factory=dict)

    def run(self, places: Sequence[int], fetched: Sequence[int], name: str) -> Extracted:
        self.taken = set(self.own)
        copier = NarrowingCopier(self.inner, [Block()])
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

    def _op(self, place: int, copier: NarrowingCopier) -> Operator:
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
