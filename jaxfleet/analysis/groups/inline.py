"""Puts a branch in place of a `cond` whose choice is known.

`optax.MultiSteps` chooses whether to skip an update, and unless it is told how, never does: its
`cond` has a literal for its choice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.groups.copier import Copier
from jaxfleet.analysis.groups.inner import Inner
from jaxfleet.analysis.groups.section import OPTIMIZE_ROLES, optimize_section
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
from jaxfleet.ir.names import unique


def inline_known_branches(program: Program) -> Program:
    """Returns the program with every `cond` of its optimize section inlined whose choice is known.

    The state that it updates is assigned after the branch. A program without such a `cond` is
    returned as it is.
    """
    inner = Inner(program)
    section, ops = optimize_section(program, inner), program.root.ops
    found = {at: branch for at in section if (branch := _chosen(ops[at], inner)) is not None}
    return _Inlining(inner, Copier(inner, [program.root]), found).run() if found else program


def _chosen(op: Operator, inner: Inner) -> Block | None:
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
    inner: Inner
    copier: Copier
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
        # What is passed through may be overwritten by an assignment before its own turn.
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
