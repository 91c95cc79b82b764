"""Reads and writes programs for the command line; `-` is stdin or stdout."""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxfleet.errors import TextError
from jaxfleet.ir import Program, parse_all, print_program
from jaxfleet.ir.serialization import load_program, save_program

STDIN = "-"


def read_programs(name: str) -> list[Program]:
    """Reads every program in a file; values of constants come from the file beside it, if any.

    Raises:
        TextError: it does not parse, contains no program, or is the abbreviated text of a dump; a
            note names the file.
        ProgramError: the values beside it belong to another program.
    """
    text = _read_text(name)
    _check_is_whole(name, text)
    try:
        programs = parse_all(text)
    except TextError as error:
        error.add_note(f"  in {shown(name)}")
        raise
    if not programs:
        hint = "a program starts with a line 'program NAME'"
        raise TextError(f"{shown(name)} holds no program", hint=hint)
    values = Path(name).with_suffix(".npz")
    return [load_program(name)] if len(programs) == 1 and values.is_file() else programs


def write_programs(programs: Sequence[Program], *, out: str | None, source: bool) -> None:
    """Writes programs as text, separated by blank lines.

    A single program written to a file keeps the values of its constants, in a file beside it.
    """
    to_file = out is not None and out != STDIN
    if to_file and len(programs) == 1 and _has_all_values(programs[0]):
        save_program(programs[0], str(out), source=source)
        return
    text = "\n\n".join(print_program(program, source=source) for program in programs) + "\n"
    if to_file:
        Path(str(out)).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


def shown(name: str) -> str:
    """Returns the name of a file in messages."""
    return "stdin" if name == STDIN else name


def _has_all_values(program: Program) -> bool:
    scopes = (program.variables, *(block.variables for block in program.blocks))
    constants = (variable.constant for scope in scopes for variable in scope.values())
    return all(constant.value is not None for constant in constants if constant is not None)


def _check_is_whole(name: str, text: str) -> None:
    """Rejects a dump that is abbreviated for reading: some of its operators are missing."""
    whole = Path(name).parent / "full" / Path(name).name
    if name == STDIN or not whole.is_file():
        return
    if _without_comments(text) != _without_comments(_read_text(str(whole))):
        what = f"{name} is abbreviated for reading: comments stand for some of its operators"
        raise TextError(what, hint=f"read the whole program: {whole}")


def _without_comments(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and line.lstrip()[0] != "#"]


def _read_text(name: str) -> str:
    if name == STDIN:
        return sys.stdin.read()
    try:
        return Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"{name} is not text: {error}") from error
