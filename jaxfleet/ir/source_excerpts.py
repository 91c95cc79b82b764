"""Excerpts of the user's files: the lines that operators come from, with lines around them."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from jaxfleet.ir import Program
from jaxfleet.ir.source import short_path, source_lines

AROUND = 5  # lines shown before and behind a line
_LONGEST = 400  # characters of a line

Excerpts: TypeAlias = Mapping[str, Mapping[int, str]]


def excerpts(program: Program, folder: Path | None = None) -> dict[str, dict[int, str]]:
    """Returns the lines of the operators of a program, by short path and number.

    Files are those that Python has loaded. A program that was read from text names its files by
    their short paths, which are looked for only if a `folder` is given: Python files in it.
    """
    wanted: dict[str, set[int]] = {}
    for block in program.blocks:
        for op in block.ops:
            for file, line in (
                (op.source.file, op.source.line),
                *(x[:2] for x in op.source.callers),
            ):
                if file:
                    wanted.setdefault(file, set()).add(line)
    found: dict[str, dict[int, str]] = {}
    for file, numbers in wanted.items():
        path: str | None = file
        if short_path(file) == file:  # the text's own form: no file is known to be meant
            path = None if folder is None else _file_in(folder, file)
        if path is None:
            continue
        lines = source_lines(path)
        around = {n for at in numbers for n in range(at - AROUND, at + AROUND + 1)}
        kept = {n: _cut(lines[n - 1]) for n in sorted(around) if 1 <= n <= len(lines)}
        if kept:
            found.setdefault(short_path(file), {}).update(kept)
    return found


def _file_in(folder: Path, short: str) -> str | None:
    """Returns the Python file that a short path may mean: of the folder, or in one in it."""
    names, root = short.split("/"), folder.resolve()
    tails = [names, names[1:]] if names[0] == root.name else [names]
    for tail in tails:
        if ".." in tail or not tail or not tail[-1].endswith(".py"):
            continue
        try:
            path = root.joinpath(*tail).resolve()
            if path.is_relative_to(root) and path.is_file():
                return str(path)
        except (OSError, ValueError):  # no name of a file
            continue
    return None


def _cut(line: str) -> str:
    text = line.rstrip("\n").expandtabs(4)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
