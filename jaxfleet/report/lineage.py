"""Follows every line of a program through its passes, and finds what each pass did to it."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.ir import Block, Kind, Operands, Operator, Program, diff
from jaxfleet.ir.call_frames import FrameTable
from jaxfleet.ir.naming import name_text
from jaxfleet.ir.printer import (
    attrs_text,
    block_heading,
    declaration_text,
    declared_first,
    operand_text,
    program_heading,
)
from jaxfleet.ir.source import short_path
from jaxfleet.ir.variable import Variable
from jaxfleet.report.history import StageRecord
from jaxfleet.report.model import NONE, Line, Order, Stage, Strings, Version

OpPlace = tuple[int, int]  # block, place in it


@dataclass
class Lineage:
    """The lines of a program and its stages.

    Attributes:
        strings: the interned strings of the report.
        lines: every line that some stage has.
        variables: (name, type, kind) of each, interned.
        stages: what each did.
        declared: the same variables, by number.
        places: by stage, the line of each operator.
        files: the user's files by short path, numbered.
        declarations: the line of each heading and declaration.
        calls: the user's calls that lead to operators.
    """

    strings: Strings
    lines: list[Line] = field(default_factory=list)
    variables: dict[tuple[str, str, str], int] = field(default_factory=dict)
    declared: list[Variable] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    places: list[dict[OpPlace, int]] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    declarations: dict[str, int] = field(default_factory=dict)
    calls: FrameTable = field(default_factory=FrameTable)

    def variable(self, variable: Variable) -> int:
        """Returns the number of a variable."""
        key = (variable.name, variable.type, variable.kind.value)
        if key not in self.variables:
            self.variables[key] = len(self.variables)
            self.declared.append(variable)
        return self.variables[key]

    def file(self, path: str) -> int:
        """Returns the number of a file; `NONE` of an empty path."""
        return self.files.setdefault(short_path(path), len(self.files)) if path else NONE

    def frames(self) -> list[tuple[int, int, int, int]]:
        """Returns the calls: file, line, function, caller; all as numbers."""
        return [
            (self.file(file), line, self.strings.number(function), caller)
            for file, line, function, caller in self.calls.rows
        ]


def follow(stages: Sequence[StageRecord], strings: Strings) -> Lineage:
    """Returns the lines of all stages, each followed from the first to the last that has it."""
    lineage = Lineage(strings)
    order: list[int] = []
    for number, stage in enumerate(stages):
        before = stages[number - 1].program if number else None
        if before is not None and (before is stage.program or before == stage.program):
            lineage.places.append(lineage.places[-1])
            lineage.stages.append(_stage(stage, order, order, (), _no_change(stage.program)))
            continue
        builder = _StageBuilder(lineage, number, stage.program)
        known = lineage.places[-1] if before is not None else {}
        new_order = builder.run(_kept(before, stage.program, known))
        moved = _moved(order, new_order)
        counts = builder.counts(order, new_order, moved, len(known))
        lineage.stages.append(_stage(stage, order, new_order, moved, counts))
        lineage.places.append(builder.places)
        order = new_order
    return lineage


def _stage(
    stage: StageRecord,
    before: Sequence[int],
    after: Sequence[int],
    moved: Sequence[int],
    counts: tuple[int, int, int, int, int, int],
) -> Stage:
    return Stage(
        stage.name,
        stage.options,
        stage.seconds,
        stage.verify_seconds,
        _edits(before, after),
        tuple(moved),
        counts,
    )


def _no_change(program: Program) -> tuple[int, int, int, int, int, int]:
    return 0, 0, 0, 0, 0, program.op_count


def _kept(
    before: Program | None, after: Program, known: Mapping[OpPlace, int]
) -> dict[OpPlace, int]:
    """Returns the lines of those operators of a program that the program before has too."""
    if before is None:
        return {}
    found = diff(before, after)
    by_block = {block.after.index: block for block in found.blocks if block.after is not None}
    old_number = {new: old for old, new in found.renumbered}
    kept: dict[OpPlace, int] = {}
    for block in after.blocks:
        if block.index not in by_block:  # equal, at this number or at another
            was = old_number.get(block.index, block.index)
            kept |= {(block.index, n): known[was, n] for n in range(len(block.ops))}
            continue
        changed = by_block[block.index]
        if changed.before is None:
            continue
        was = changed.before.index
        pairs = [
            (change.at_before, change.at_after)
            for change in changed.operators
            if change.at_before is not None and change.at_after is not None
        ]
        olds = {change.at_before for change in changed.operators}
        news = {change.at_after for change in changed.operators}
        same_old = [n for n in range(len(changed.before.ops)) if n not in olds]
        same_new = [n for n in range(len(block.ops)) if n not in news]
        for old, new in (*pairs, *zip(same_old, same_new, strict=True)):
            kept[block.index, new] = known[was, old]
    return kept


class _StageBuilder:
    """Makes the lines of one stage."""

    def __init__(self, lineage: Lineage, stage: int, program: Program) -> None:
        self.lineage, self.stage, self.program = lineage, stage, program
        self.number = lineage.strings.number
        self.places: dict[OpPlace, int] = {}
        self.new: set[int] = set()
        self.changed: set[int] = set()
        self.retyped: set[int] = set()

    def run(self, kept: Mapping[OpPlace, int]) -> list[int]:
        """Returns the stage's lines in order."""
        order = [self._text_line("program", "", program_heading(self.program))]
        order += [self._declaration(v, "") for v in self.program.variables.values()]
        for block in self.program.blocks:
            order += self._block(block, kept)
        return order

    def counts(
        self, before: Sequence[int], after: Sequence[int], moved: Sequence[int], old_ops: int
    ) -> tuple[int, int, int, int, int, int]:
        """Returns the operators added, removed, changed, retyped, moved, and in all."""
        lines = self.lineage.lines
        now = {line for line in after if lines[line].kind == "op"}
        was = {line for line in before if lines[line].kind == "op"}
        assert len(was) == old_ops, "a line of an operator stands once"
        places = sum(lines[line].kind == "op" for line in moved)
        return (
            len(now - was), len(was - now), len(self.changed), len(self.retyped), places, len(now),
        )  # fmt: skip

    def _block(self, block: Block, kept: Mapping[OpPlace, int]) -> Iterator[int]:
        if len(self.program.blocks) > 1 or block.args:
            heading = block_heading(block, dict(block.variables))
            yield self._text_line("block", str(block.index), heading)
        for variable in declared_first(block):
            if variable.kind is not Kind.TEMP:
                yield self._declaration(variable, f"{block.index}:")
        for place, op in enumerate(block.ops):
            line = kept.get((block.index, place))
            version = self._version(op, block)
            if line is None:
                line = self._new_line(op)
            self._add(line, version)
            self.places[block.index, place] = line
            yield line

    def _new_line(self, op: Operator) -> int:
        lines, source = self.lineage.lines, op.source
        self.new.add(len(lines))
        lines.append(
            Line(
                "op",
                self.lineage.file(source.file),
                source.line,
                self._interned(source.function),
                self._interned(source.scope),
                self._interned(source.made_by),
                self.lineage.calls.number(source.callers),
            )
        )
        return len(lines) - 1

    def _interned(self, text: str) -> int:
        return self.number(text) if text else NONE

    def _add(self, line: int, version: Version) -> None:
        versions = self.lineage.lines[line].versions
        if not versions or not versions[-1].same_text(version):
            if versions and line not in self.new:
                is_same = _untyped(self, versions[-1]) == _untyped(self, version)
                (self.retyped if is_same else self.changed).add(line)
            versions.append(version)

    def _text_line(self, kind: str, key: str, text: str) -> int:
        """Returns the line of a heading."""
        name = f"{kind} {key}"
        if name not in self.lineage.declarations:
            self.lineage.declarations[name] = len(self.lineage.lines)
            self.lineage.lines.append(Line(kind))
        line = self.lineage.declarations[name]
        versions = self.lineage.lines[line].versions
        version = Version(self.stage, NONE, self.number(text), [], [])
        if not versions or not versions[-1].same_text(version):
            versions.append(version)
        return line

    def _declaration(self, variable: Variable, where: str) -> int:
        name = f"declaration {where}{variable.name}"
        if name not in self.lineage.declarations:
            self.lineage.declarations[name] = len(self.lineage.lines)
            self.lineage.lines.append(Line("declaration"))
        line = self.lineage.declarations[name]
        _, found, value = declaration_text(variable).partition(" = ")
        attrs = self.number(value) if found and variable.kind is Kind.CONST else NONE
        kind, output = self.number(variable.kind.value), [self.lineage.variable(variable)]
        version = Version(self.stage, NONE, kind, output, [], attrs)
        versions = self.lineage.lines[line].versions
        if not versions or not versions[-1].same_text(version):
            versions.append(version)
        return line

    def _version(self, op: Operator, block: Block) -> Version:
        pairs = [self._named(name, block) for pair in op.role_var for name in pair]
        return Version(
            self.stage,
            self.number(op.role.value),
            self.number(name_text(op.type)),
            self._operands(op.outputs, block),
            self._operands(op.inputs, block),
            self.number(attrs_text(op.attrs)) if op.attrs else NONE,
            tuple(pairs),
        )

    def _operands(self, operands: Operands, block: Block) -> list[int | list[int]]:
        found: list[int | list[int]] = []
        for slot, items in operands.slots:
            numbers = [
                self._named(item, block)
                if isinstance(item, str)
                else ~self.number(operand_text(item))
                for item in items
            ]
            if slot:
                found.append([self.number(name_text(slot)), *numbers])
            else:
                found.extend(numbers)
        return found

    def _named(self, name: str, block: Block) -> int:
        at = block
        for _ in self.program.blocks:  # parents of an invalid program may form a ring
            if name in at.variables:
                return self.lineage.variable(at.variables[name])
            if not 0 <= at.parent < len(self.program.blocks):
                break
            at = self.program.blocks[at.parent]
        found = self.program.variables.get(name)  # a pair may name what this program has not
        return self.lineage.variable(found or Variable(name, "", ()))


def _untyped(builder: _StageBuilder, version: Version) -> object:
    """Returns a version with names instead of variables, which have types."""
    declared = builder.lineage.declared

    def names(operands: Sequence[int | list[int]]) -> list[object]:
        return [
            [item[0], *names(item[1:])]
            if isinstance(item, list)
            else declared[item].name
            if item >= 0
            else item
            for item in operands
        ]

    pairs = tuple(declared[number].name for number in version.pairs)
    key = replace(version, stage=0, outputs=names(version.outputs), inputs=names(version.inputs))
    return (key.role, key.type, key.outputs, key.inputs, key.attrs, pairs)


def _edits(before: Sequence[int], after: Sequence[int]) -> Order:
    """Returns an order as runs of the order before, and single lines."""
    at = {line: place for place, line in enumerate(before)}
    edits: Order = []
    for line in after:
        place = at.get(line)
        if place is None:
            edits.append(line)
        elif edits and isinstance(edits[-1], list) and sum(edits[-1]) == place:
            edits[-1][1] += 1
        else:
            edits.append([place, 1])
    return edits


def _moved(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Returns lines of both orders that stand elsewhere: the fewest, so all others agree."""
    at = {line: place for place, line in enumerate(before)}
    common = [line for line in after if line in at]
    ends: list[int] = []  # by length, the least last place of an ascending row of lines
    rows: list[int] = []  # the line at that place
    previous: dict[int, int | None] = {}
    for line in common:
        length = bisect_left(ends, at[line])
        previous[line] = rows[length - 1] if length else None
        if length == len(ends):
            ends.append(at[line])
            rows.append(line)
        else:
            ends[length], rows[length] = at[line], line
    kept: set[int] = set()
    line_: int | None = rows[-1] if rows else None
    while line_ is not None:
        kept.add(line_)
        line_ = previous[line_]
    return [line for line in common if line not in kept]
