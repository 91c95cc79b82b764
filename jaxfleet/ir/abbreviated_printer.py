"""Prints a program for reading: important lines in full, runs of others as one comment.

A captured step has hundreds of operators, of which a dozen matter to a reader inspecting a pass.
The text resembles IR text, but is not meant to be parsed.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile

from jaxfleet.ir.attributes import Attrs, Word
from jaxfleet.ir.printer import (
    block_heading,
    commented_text,
    declaration_text,
    declared_first,
    print_program,
    program_heading,
)
from jaxfleet.ir.program import Block, Operator, Program, Role
from jaxfleet.ir.variable import Variable

_MAX_FACTS = 5  # items of a list in the program's first line
_MAX_TYPES = 5  # operator types, or types of variables, in a folded line


@dataclass(frozen=True)
class _Detail:
    """How much to show.

    Attributes:
        scope: the number of common scope components for folding operators together.
        path: the number of common path components for folding variables; None folds none of them.
        owners: show operators that run sub-blocks.
        blocks: show each sub-block; otherwise one without an operator to keep is one line.
        roles: fold operators of each role separately.
    """

    scope: int
    path: int | None = None
    owners: bool = True
    blocks: bool = True
    roles: bool = True


_DETAILS = (
    _Detail(scope=3),
    _Detail(scope=2),
    _Detail(scope=2, path=3),
    _Detail(scope=1, path=3),
    _Detail(scope=1, path=2),
    _Detail(scope=0, path=2),
    _Detail(scope=0, path=1, owners=False),
    _Detail(scope=0, path=0, owners=False, blocks=False),
    _Detail(scope=0, path=0, owners=False, blocks=False, roles=False),
)


def print_folded(
    program: Program, *, keep: Callable[[Operator], bool], max_lines: int = 120, source: bool = True
) -> str:
    """Returns a program's text with less important lines folded into comments.

    A program within `max_lines` is printed whole. Otherwise runs of operators of one role that need
    not be kept become comments such as `# 34 operators in CNN/Conv_0: add 10, dot_general 3`,
    grouped by as many scope components as fit; then declarations are folded by their paths.

    Args:
        program: any program.
        keep: whether to show an operator, however many there are; they may exceed `max_lines`.
        max_lines: the most lines of the text.
        source: add the source lines of the operators that are shown.
    """
    text = print_program(program, source=source)
    if text.count("\n") < max_lines:
        return text
    lines: list[str] = []
    for detail in _DETAILS:
        lines = list(_Folded(program, keep, detail, source).lines())
        if len(lines) <= max_lines:
            break
    return "\n".join(lines)


@dataclass(frozen=True)
class _Folded:
    """A program's text at one level of detail."""

    program: Program
    keep: Callable[[Operator], bool]
    detail: _Detail
    source: bool

    def lines(self) -> Iterator[str]:
        yield _short_heading(self.program)
        yield from _indented(2, self._declarations(self.program.variables.values()))
        for shown, blocks in groupby(self.program.blocks, key=self._is_shown):
            if shown:
                for block in blocks:
                    yield from _indented(2, self._block(block))
            else:
                yield from _indented(2, [_folded_blocks(list(blocks))])

    def _is_shown(self, block: Block) -> bool:
        return self.detail.blocks or block.index == 0 or any(map(self.keep, block.ops))

    def _is_kept(self, op: Operator) -> bool:
        return self.keep(op) or (self.detail.owners and bool(op.blocks))

    def _block(self, block: Block) -> Iterator[str]:
        early = declared_first(block)
        pending = dict(block.variables)
        for variable in early:
            del pending[variable.name]
        yield block_heading(block, pending)
        yield from _indented(2, self._declarations(early))
        role: Role | None = None
        for group in self._groups(block.ops):
            if len(group) > 1 and not self.detail.roles:
                role = None
                yield f"  {self._group_text(group, pending)}"
                continue
            if group[0].role is not role:
                role = group[0].role
                yield f"  {role.value}"
            yield f"    {self._group_text(group, pending)}"

    def _groups(self, ops: Iterable[Operator]) -> Iterator[list[Operator]]:
        """Yields the operators of each line."""

        def key(op: Operator) -> tuple[bool, Role | None]:
            return self._is_kept(op), op.role if self.detail.roles else None

        for (kept, _), run in groupby(ops, key=key):
            found = list(run)
            yield from ([op] for op in found) if kept else _by_scope(found, self.detail.scope)

    def _group_text(self, group: Sequence[Operator], pending: dict[str, Variable]) -> str:
        if len(group) == 1:
            return commented_text(group[0], pending, source=self.source)
        for op in group:  # declares them silently, so that a later write is an update
            for name in op.writes:
                pending.pop(name, None)
        return _folded_operators(group)

    def _declarations(self, variables: Iterable[Variable]) -> Iterator[str]:
        parts = self.detail.path
        for (kind, path), run in groupby(variables, key=lambda var: (var.kind, _path(var, parts))):
            group = list(run)
            if len(group) == 1 or path is None:
                yield from map(declaration_text, group)
            else:
                label = _common_path(["/".join(_parts(var.name)[:-1]) for var in group])
                types = Counter(variable.type for variable in group)
                where = f" in {label}" if label else ""
                yield f"# {len(group)} {kind.value}{where}: {_counts(types)}"


def _short_heading(program: Program) -> str:
    """Returns a program's first line with long lists (of donated variables) cut short."""
    facts = {
        name: (*value[:2], Word(f"and-{len(value) - 2}-more"))
        if isinstance(value, tuple) and len(value) > _MAX_FACTS
        else value
        for name, value in program.attrs.items()
    }
    return program_heading(replace(program, attrs=Attrs(facts)))


def _path(variable: Variable, parts: int | None) -> str | None:
    """Returns the path prefix by which a variable is folded with its neighbours, or None."""
    folder = _parts(variable.name)[:-1]
    if parts is None or (parts and not folder):
        return None
    return "/".join(folder[:parts])


def _by_scope(ops: Iterable[Operator], parts: int) -> Iterator[list[Operator]]:
    """Yields neighbours that share `parts` scope components.

    Operators without a scope between two of one scope join those: jax inserts most of them around
    the user's own.
    """
    groups: list[tuple[list[str], list[Operator]]] = []
    for scope, run in groupby(ops, key=lambda op: _parts(op.source.scope)[:parts]):
        if len(groups) > 1 and groups[-1][0] == [""] and groups[-2][0] == scope:
            _, between = groups.pop()
            groups[-1][1].extend([*between, *run])
        else:
            groups.append((scope, list(run)))
    for _, group in groups:
        yield group


def _folded_operators(ops: Sequence[Operator]) -> str:
    scope = _common_path([op.source.scope for op in ops if op.source.scope])
    where = f" in {scope}" if scope else ""
    roles = Counter(op.role.value for op in ops)
    which = f" ({_counts(roles)})" if len(roles) > 1 else ""
    return f"# {len(ops)} operators{which}{where}: {_type_counts(ops)}"


def _folded_blocks(blocks: Sequence[Block]) -> str:
    first, last = blocks[0].index, blocks[-1].index
    which = f"block {first}" if first == last else f"blocks {first} to {last}"
    ops = [op for block in blocks for op in block.ops]
    return f"# {which}, {len(ops)} operators: {_type_counts(ops)}"


def _type_counts(ops: Iterable[Operator]) -> str:
    return _counts(Counter(op.type.removeprefix("jax.") for op in ops))


def _counts(counts: Counter[str]) -> str:
    """Returns the most frequent with their numbers: `add 10, dot_general 3 and 2 more`."""
    common = ", ".join(f"{what} {count}" for what, count in counts.most_common(_MAX_TYPES))
    rest = len(counts) - _MAX_TYPES
    return f"{common} and {rest} more" if rest > 0 else common


def _common_path(paths: Sequence[str]) -> str:
    columns = zip(*map(_parts, paths), strict=False)
    common = takewhile(lambda column: len(set(column)) == 1, columns)
    return "/".join(column[0] for column in common)


def _parts(path: str) -> list[str]:
    return path.split("/")


def _indented(spaces: int, lines: Iterable[str]) -> Iterator[str]:
    return (" " * spaces + line for line in lines)
