"""Excerpts of the user's files: the lines that operators come from, with lines around them."""

from collections.abc import Mapping
from typing import TypeAlias

from jaxfleet.ir import Program
from jaxfleet.ir.source import short_path, source_lines

AROUND = 5  # lines shown before and behind a line
_LONGEST = 400  # characters of a line

Excerpts: TypeAlias = Mapping[str, Mapping[int, str]]


def excerpts(program: Program) -> dict[str, dict[int, str]]:
    """Returns the lines of the operators of a program, by short path and number.

    Files are those that Python has loaded: a program that was read from text names its files by
    their short paths, which are not looked for.
    """
    wanted: dict[str, set[int]] = {}
    for block in program.blocks:
        for op in block.ops:
            if op.source.file:
                wanted.setdefault(op.source.file, set()).add(op.source.line)
    found: dict[str, dict[int, str]] = {}
    for file, numbers in wanted.items():
        if short_path(file) == file:  # the text's own form: no file is known to be meant
            continue
        lines = source_lines(file)
        around = {n for at in numbers for n in range(at - AROUND, at + AROUND + 1)}
        kept = {n: _cut(lines[n - 1]) for n in sorted(around) if 1 <= n <= len(lines)}
        if kept:
            found.setdefault(short_path(file), {}).update(kept)
    return found


def _cut(line: str) -> str:
    text = line.rstrip("\n").expandtabs(4)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
