"""Rewrites branches of the optimize section: inlines known ones, splits others by parameter.

`optax.MultiSteps` and `optax.apply_if_finite` put a whole update under one `cond`. Its result for
one parameter depends on that parameter, its gradient, its state and the predicate; so it is
equivalent to several conditionals on one predicate, each of which can move with its parameter. A
`cond` on a literal, as `optax.MultiSteps` without a skip has, is inlined.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.optimizer_groups.extraction import NarrowingCopier
from jaxfleet.analysis.optimizer_groups.optimize_section import (
    OPTIMIZE_ROLES,
    SectionGraph,
    SubblockDeps,
    optimize_section,
    union,
)
from jaxfleet.analysis.optimizer_groups.ownership import Ownership, is_several, is_single
from jaxfleet.ir import (
    Block,
    BlockRef,
    Kind,
    Literal,
    Operand,
    Operands,
    Operator,
    Program,
    Role,
    Variable,
)
from jaxfleet.ir.naming import unique


def inline_known_branches(program: Program) -> Program:
    """Inlines every `cond` of a program's optimize section whose predicate is known.

    The state that it updates is assigned after the branch. A program without such a `cond` is
    returned unchanged.
    """
    inner = SubblockDeps(program)
    section, ops = optimize_section(program, inner), program.root.ops
    found = {at: branch for at in section if (branch := _chosen(ops[at], inner)) is not None}
    return (
        _Inlining(inner, NarrowingCopier(inner, [program.root]), found).run() if found else program
    )


def _chosen(op: Operator, inner: SubblockDeps) -> Block | None:
    """Returns the branch that a `cond` always takes, or None."""
    choice = op.inputs[0] if op.inputs else None
    if not inner.can_narrow(op) or not isinstance(choice, Literal):
        return None
    branches = op.attrs["branches"]
    assert isinstance(branches, tuple)
    ref = branches[min(max(int(choice.value.real), 0), len(branches) - 1)]
    assert isinstance(ref, BlockRef)
    return inner.program.blocks[ref.index]


@dataclass
class _Inlining:
    inner: SubblockDeps
    copier: NarrowingCopier
    branches: Mapping[int, Block]  # the branches to inline, by place
    variables: dict[str, Variable] = field(default_factory=dict)
    ops: list[Operator] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)

    def run(self) -> Program:
        program = self.inner.program
        self.variables = dict(program.root.variables)
        self.taken = {*self.variables, *program.variables}
        for at, op in enumerate(program.root.ops):
            if at in self.branches:
                self._inline(op, self.branches[at])
            else:
                self.ops.append(self.copier.copy(op))
        root = replace(program.root, ops=tuple(self.ops), variables=self.variables)
        return replace(program, blocks=(root.without_unused(), *self.copier.blocks[1:]))

    def _inline(self, cond: Operator, branch: Block) -> None:
        names: dict[str, Operand] = dict(zip(branch.args, cond.inputs[1:], strict=True))
        for op in branch.ops:
            copied = self.copier.copy(op)
            inputs = op.inputs.renamed(names)
            for name in op.writes:
                names[name] = self._temporary(branch.variables[name])
            role = Role.OPTIMIZE if op.role not in OPTIMIZE_ROLES else op.role
            self.ops.append(
                replace(copied, inputs=inputs, outputs=op.outputs.renamed(names), role=role)
            )
        results = [names.get(x, x) if isinstance(x, str) else x for x in branch.results]
        # An argument passed through may be overwritten by an earlier assignment.
        passed = set(cond.writes).intersection(x for x in results if isinstance(x, str))
        copies = {name: self._copy(name, cond) for name in sorted(passed)}
        for name, result in zip(cond.writes, results, strict=True):
            value = copies.get(result, result) if isinstance(result, str) else result
            if name != result:
                self._assign(name, value, cond)

    def _copy(self, name: str, near: Operator) -> str:
        like = self.inner.program.lookup(name)
        copy = self._temporary(replace(like, name=f"{name}.old", kind=Kind.TEMP, constant=None))
        self._assign(copy, name, near)
        return copy

    def _assign(self, name: str, value: Operand, near: Operator) -> None:
        inputs, outputs = Operands.of(value), Operands.of(name)
        self.ops.append(Operator("assign", inputs, outputs, role=near.role, source=near.source))

    def _temporary(self, like: Variable) -> str:
        name = unique(like.name, self.taken)
        self.taken.add(name)
        self.variables[name] = replace(like, name=name)
        return name


# Parts that belong to no single parameter, by their reads: several parameters, values made of
# several, or none.
_SEVERAL, _COMMON, _FREE = -2, -1, 0


def split_branches(program: Program) -> Program:
    """Splits every `cond` of a program's optimize section by parameter.

    The results that read one parameter, its gradient or its state get a `cond` of their own; the
    others by whether they read several, or none. Where the predicate is known, the branch replaces
    the `cond`. A program without a `cond` is returned unchanged.
    """
    program = inline_known_branches(program)
    while (after := _split_once(program)) is not program:
        program = after  # of two branches in a row, the second divides only after the first
    return program


def _split_once(program: Program) -> Program:
    inner, ops = SubblockDeps(program), program.root.ops
    if not any(map(inner.can_narrow, ops)):
        return program
    owners = Ownership.of(SectionGraph.of(program))
    found = {
        place: _parts(owners, place, ops[place])
        for place in owners.graph.nodes
        if inner.can_narrow(ops[place])
    }
    parts = {place: outputs for place, outputs in found.items() if len(outputs) > 1}
    if not parts:
        return program
    copier = NarrowingCopier(inner, [program.root])
    split: list[Operator] = []
    for place, op in enumerate(ops):
        split += [copier.copy(op, outputs) for outputs in parts.get(place, [None])]
    return replace(program, blocks=(program.root.with_ops(split), *copier.blocks[1:]))


def _parts(owners: Ownership, place: int, op: Operator) -> list[list[int]]:
    """Returns the outputs of an operator in groups, in a safe order.

    State is updated in place: no part may read what an earlier part writes.
    """
    node, parts = owners.graph.nodes[place], dict[int, list[int]]()
    for output, reads in enumerate(node.reads):
        parts.setdefault(_key(owners, reads), []).append(output)
    singles = [key for key in parts if key > 0]
    keys = [key for key in (_SEVERAL, *singles, _COMMON, _FREE) if key in parts]
    written = set[str]()
    for key in keys:
        values = (value for output in parts[key] for value in node.reads[output])
        if written.intersection(owners.graph.values[value].name for value in values):
            return [list(range(len(op.writes)))]
        written.update(op.writes[output] for output in parts[key])
    return [parts[key] for key in keys]


def _key(owners: Ownership, reads: Sequence[int]) -> int:
    masks = [owners.own[value] for value in reads]
    whose = union(mask for mask in masks if is_single(mask))
    if is_several(whose):
        return _SEVERAL
    return whose or (_COMMON if any(masks) else _FREE)
