"""The differences of two programs, variable by variable and operator by operator."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal, TypeAlias

from jaxfleet.ir.inline import with_block_numbers
from jaxfleet.ir.patience_diff import match
from jaxfleet.ir.printer import (
    attrs_text,
    block_heading,
    declaration_text,
    name_text,
    operator_text,
)
from jaxfleet.ir.program import Block, Operator, Program
from jaxfleet.ir.variable import Kind, Variable

ChangeKind: TypeAlias = Literal["added", "removed", "changed", "moved"]

_MAX_LINES = 40  # of a program's or block's differences in the text


@dataclass(frozen=True)
class OperatorChange:
    """One operator that differs: as it was (None if added) and is (None if removed), and where.

    Its places, `at_before` and `at_after`, are counted within its block.
    """

    kind: ChangeKind
    before: Operator | None = None
    after: Operator | None = None
    at_before: int | None = None
    at_after: int | None = None


@dataclass(frozen=True)
class VariableChange:
    """One variable that differs: as it was (None if added), and is (None if removed)."""

    before: Variable | None
    after: Variable | None

    @property
    def name(self) -> str:
        variable = self.before or self.after
        assert variable is not None
        return variable.name

    @property
    def only(self) -> Variable | None:
        """The variable if it was added or removed, None if it was changed."""
        if self.before is None:
            return self.after
        return self.before if self.after is None else None


@dataclass(frozen=True)
class BlockDiff:
    """The differences of a block (None if added) and its counterpart (None if removed)."""

    before: Block | None
    after: Block | None
    variables: tuple[VariableChange, ...] = ()
    operators: tuple[OperatorChange, ...] = ()


@dataclass(frozen=True)
class ProgramDiff:
    """The differences of two programs, source lines excluded.

    A block's counterpart is the block with the same content, at any index; a different index alone
    is not a difference of that block.

    Attributes:
        variables: the programs' own variables that differ.
        renumbered: (index before, index after) of blocks whose index differs.
    """

    before: Program
    after: Program
    variables: tuple[VariableChange, ...]
    blocks: tuple[BlockDiff, ...]
    renumbered: tuple[tuple[int, int], ...]

    @property
    def is_empty(self) -> bool:
        """Whether the programs are equal."""
        same_heading = (self.before.name, self.before.attrs) == (self.after.name, self.after.attrs)
        return same_heading and not (self.variables or self.blocks or self.renumbered)

    def operators(self, kind: ChangeKind) -> tuple[OperatorChange, ...]:
        """Returns the changes of one kind, in all blocks."""
        return tuple(
            change for block in self.blocks for change in block.operators if change.kind == kind
        )

    def text(self, *, max_lines: int = _MAX_LINES) -> str:
        """Describes the differences: `+` added, `-` removed, `~` changed, `>` moved.

        At most `max_lines` are listed for the program and for each block.
        """
        return "\n".join(_lines(self, max_lines))

    def __str__(self) -> str:
        return self.text()


def diff(before: Program, after: Program) -> ProgramDiff:
    """Returns the differences of two programs, in about linear time."""
    counterparts = _counterparts(before, after)
    numbers = {i: j for i, j in counterparts if i is not None and j is not None}

    def new_number(index: int) -> int:
        if index < len(before.blocks):  # a block without a counterpart gets an unused number
            return numbers.get(index, len(after.blocks) + index)
        return index

    blocks = []
    for i, j in counterparts:
        old = before.blocks[i] if i is not None else None
        new = after.blocks[j] if j is not None else None
        comparable = _renumbered(old, new_number) if old is not None else None
        if comparable != new:
            blocks.append(_block_diff(old, comparable, new))
    return ProgramDiff(
        before,
        after,
        variables=_variable_changes(before.variables, after.variables),
        blocks=tuple(blocks),
        renumbered=tuple((i, j) for i, j in numbers.items() if i != j),
    )


def _counterparts(before: Program, after: Program) -> list[tuple[int | None, int | None]]:
    """Returns pairs of the numbers of counterparts, None for a block without one."""
    roots = [(0, 0)] if before.blocks and after.blocks else []
    same = match(
        [_content(block) for block in before.blocks[1:]],
        [_content(block) for block in after.blocks[1:]],
    )
    same = [*roots, *((i + 1, j + 1) for i, j in same)]
    return [
        pair
        for gap_before, gap_after, matched in _gaps(same, len(before.blocks), len(after.blocks))
        for pair in [*zip_longest(gap_before, gap_after), *matched]
    ]


def _content(block: Block) -> Hashable:
    """Returns the content of a block, without its number and those of its sub-blocks."""
    masked = tuple(with_block_numbers(op, lambda _: 0) for op in block.ops)
    return block.args, block.results, masked


def _gaps(
    pairs: Sequence[tuple[int, int]], before: int, after: int
) -> Iterator[tuple[range, range, Sequence[tuple[int, int]]]]:
    """Yields the stretches between matched pairs, with the next pair, if any."""
    i = j = 0
    for pair in pairs:
        yield range(i, pair[0]), range(j, pair[1]), [pair]
        i, j = pair[0] + 1, pair[1] + 1
    yield range(i, before), range(j, after), []


def _renumbered(block: Block, number: Callable[[int], int]) -> Block:
    """Returns a block of the first program with blocks numbered as in the second."""
    ops = [with_block_numbers(op, number) for op in block.ops]
    parent = number(block.parent) if block.parent >= 0 else block.parent
    return replace(block, index=number(block.index), parent=parent, ops=tuple(ops))


def _block_diff(before: Block | None, comparable: Block | None, after: Block | None) -> BlockDiff:
    old, new = comparable or Block(), after or Block()
    changes = _operator_changes(old.ops, new.ops)
    if before is not None:  # show its operators with their original numbers
        changes = tuple(
            replace(change, before=before.ops[change.at_before])
            if change.at_before is not None
            else change
            for change in changes
        )
    return BlockDiff(before, after, _variable_changes(old.variables, new.variables), changes)


def _variable_changes(
    before: Mapping[str, Variable], after: Mapping[str, Variable]
) -> tuple[VariableChange, ...]:
    gone = [VariableChange(var, None) for name, var in before.items() if name not in after]
    new = [VariableChange(None, var) for name, var in after.items() if name not in before]
    both = [(var, after[name]) for name, var in before.items() if name in after]
    return (*gone, *(VariableChange(x, y) for x, y in both if x != y), *new)


def _operator_changes(
    before: Sequence[Operator], after: Sequence[Operator]
) -> tuple[OperatorChange, ...]:
    same = match(before, after)
    old = dict(enumerate(before))
    new = dict(enumerate(after))
    for i, j in same:
        del old[i], new[j]
    # The unmatched on both sides are paired by likeness, the strictest first.
    moved = list(_paired(old, new, lambda op: op))
    changed = list(_paired(old, new, lambda op: (op.type, op.reads, op.writes)))
    changed += _paired(old, new, lambda op: op.writes or None)
    changes = [OperatorChange("moved", before[i], after[j], i, j) for i, j in moved]
    changes += [OperatorChange("changed", before[i], after[j], i, j) for i, j in changed]
    changes += [OperatorChange("removed", before=op, at_before=i) for i, op in old.items()]
    changes += [OperatorChange("added", after=op, at_after=j) for j, op in new.items()]
    return tuple(sorted(changes, key=_place(same)))


def _paired(
    old: dict[int, Operator], new: dict[int, Operator], likeness: Callable[[Operator], Hashable]
) -> Iterator[tuple[int, int]]:
    """Yields pairs of places of similar operators, and removes them from both sides."""
    waiting: dict[Hashable, list[int]] = {}
    for i, op in reversed(old.items()):
        waiting.setdefault(likeness(op), []).append(i)
    for j, op in list(new.items()):
        like = likeness(op)
        if like is not None and waiting.get(like):
            i = waiting[like].pop()
            del old[i], new[j]
            yield i, j


def _place(same: Sequence[tuple[int, int]]) -> Callable[[OperatorChange], tuple[int, bool, int]]:
    """Returns the key that sorts changes by position between the unchanged operators."""
    olds, news = [i for i, _ in same], [j for _, j in same]

    def key(change: OperatorChange) -> tuple[int, bool, int]:
        if change.at_after is not None:
            return bisect_left(news, change.at_after), True, change.at_after
        assert change.at_before is not None
        return bisect_left(olds, change.at_before), False, change.at_before

    return key


def _lines(diff: ProgramDiff, max_lines: int) -> Iterator[str]:
    before, after = diff.before, diff.after
    yield _change_text(f"program {name_text(before.name)}", f"program {name_text(after.name)}")
    if diff.is_empty:
        yield "  no difference"
    facts = [f"  ~ {attrs_text(before.attrs)} -> {attrs_text(after.attrs)}"]
    variables = [_variable_line(change) for change in diff.variables]
    yield from _capped((facts if before.attrs != after.attrs else []) + variables, max_lines)
    moved = [f"  block {i} is now block {j}" for i, j in diff.renumbered]
    yield from _capped(moved, max_lines)
    for block in diff.blocks:
        heading, *changes = _block_lines(block)
        yield heading
        yield from _capped(changes, max_lines)


def _block_lines(block: BlockDiff) -> list[str]:
    """Returns a heading, and a line for each change.

    A temporary added or removed with its operator has its type there, and no line of its own.
    """
    temps = {
        change.name: variable
        for change in block.variables
        if (variable := change.only) is not None and variable.kind is Kind.TEMP
    }
    pending = dict(temps)
    heading = _heading_line(block, pending)
    operators = [_operator_line(change, pending) for change in block.operators]
    typed = temps.keys() - pending.keys()
    variables = [_variable_line(c) for c in block.variables if c.name not in typed]
    return [heading, *variables, *operators]


def _heading_line(block: BlockDiff, pending: dict[str, Variable]) -> str:
    old = block_heading(block.before, pending) if block.before is not None else ""
    new = block_heading(block.after, pending) if block.after is not None else ""
    if not old or not new:
        count = len(block.operators)
        return f"{old or new}: {'added' if new else 'removed'}, {count} operators"
    kinds = Counter(change.kind for change in block.operators)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return f"{_change_text(old, new)}: {counts or 'no operators differ'}"


def _variable_line(change: VariableChange) -> str:
    old = declaration_text(change.before) if change.before is not None else ""
    new = declaration_text(change.after) if change.after is not None else ""
    mark = "~" if old and new else "+" if new else "-"
    return f"  {mark} {_change_text(old, new)}"


def _operator_line(change: OperatorChange, pending: dict[str, Variable]) -> str:
    old = operator_text(change.before, pending) if change.before is not None else ""
    new = operator_text(change.after, pending) if change.after is not None else ""
    if change.kind == "moved":
        return f"  > {new} (from {change.at_before} to {change.at_after})"
    mark = {"added": "+", "removed": "-", "changed": "~"}[change.kind]
    return f"  {mark} {_change_text(old, new)}"


def _change_text(old: str, new: str) -> str:
    return f"{old} -> {new}" if old and new and old != new else new or old


def _capped(lines: list[str], max_lines: int) -> list[str]:
    if len(lines) <= max_lines:
        return lines
    return [*lines[:max_lines], f"  ... and {len(lines) - max_lines} more"]
