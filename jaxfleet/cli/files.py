"""Reads and writes programs for the command line; `-` is stdin or stdout."""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxfleet.errors import TextError
from jaxfleet.ir import Program, parse_all, print_program
from jaxfleet.ir.resources import load_program, save_program

STDIN = "-"


def read_programs(name: str) -> list[Program]:
    """Reads every program in a file; one that has its constants' values beside it, with them.

    Raises:
        TextError: it does not parse, or holds no program; a note names the file.
        ProgramError: the values beside it are not its own.
    """
    try:
        programs = parse_all(_read_text(name))
    except TextError as error:
        error.add_note(f"  in {shown(name)}")
        raise
    if not programs:
        hint = "a program starts with a line 'program NAME'"
        raise TextError(f"{shown(name)} holds no program", hint=hint)
    values = Path(name).with_suffix(".npz")
    return [load_program(name)] if len(programs) == 1 and values.is_file() else programs


def write_programs(programs: Sequence[Program], *, out: str | None, source: bool) -> None:
    """Writes programs as text, a blank line between them.

    A single program that goes to a file takes the values of its constants along.

    Args:
        programs: what to write.
        out: the file, or None for stdout.
        source: add the user's source lines as comments.
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
    """Returns how messages call a file."""
    return "stdin" if name == STDIN else name


def _has_all_values(program: Program) -> bool:
    scopes = (program.variables, *(block.variables for block in program.blocks))
    constants = (variable.constant for scope in scopes for variable in scope.values())
    return all(constant.value is not None for constant in constants if constant is not None)


def _read_text(name: str) -> str:
    if name == STDIN:
        return sys.stdin.read()
    try:
        return Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"{name} is no text: {error}") from error
