"""Program files: the text, and beside it the values of constants.

A program's text names its larger constants by digest. `save_program` writes their values beside it,
as `NAME.npz`: arrays by digest, of every dtype that the IR knows.
"""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.ir.array_files import ArrayFileError, read_arrays, write_arrays
from jaxfleet.ir.parser import parse
from jaxfleet.ir.printer import print_program
from jaxfleet.ir.program import Program
from jaxfleet.ir.variable import (
    Constant,
    Variable,
    dtype_of,
    inline_values,
    make_constant,
    type_text,
)


def save_program(program: Program, path: str | os.PathLike[str], *, source: bool = False) -> None:
    """Writes a program's text, and beside it the values that are too large for the text.

    Each file is replaced atomically: a reader sees the old one or the new one. The values are
    written first, so that a text never exists without its values.

    Args:
        program: any program.
        path: the text's file; the values go beside it, with the suffix `.npz`.
        source: add the user's source lines as comments.

    Raises:
        ProgramError: a constant has no value, or its value does not match its digest.
    """
    text = print_program(program, source=source) + "\n"
    entries = _entries(program)
    if entries:
        with _replacing(_values_path(path)) as draft:
            write_arrays(draft, entries.items())
    with _replacing(Path(path)) as draft:
        draft.write_text(text, encoding="utf-8")


def load_program(path: str | os.PathLike[str]) -> Program:
    """Reads a program that `save_program` wrote, with its values.

    Raises:
        TextError: the file does not contain a program.
        ProgramError: the values of its constants are missing or damaged.
    """
    program = parse(Path(path).read_text(encoding="utf-8"))
    wanted = {_constant(v).digest for v in _constants(program) if _constant(v).value is None}
    return with_values(program, _read_values(_values_path(path), wanted)) if wanted else program


def with_values(program: Program, values: Mapping[str, Any]) -> Program:
    """Returns the program with a value for every constant that has none, from arrays by digest.

    Raises:
        ProgramError: a value is missing or does not match its digest.
    """

    def filled(scope: Mapping[str, Variable]) -> dict[str, Variable]:
        return {name: _with_value(variable, values) for name, variable in scope.items()}

    blocks = (replace(block, variables=filled(block.variables)) for block in program.blocks)
    return replace(program, variables=filled(program.variables), blocks=tuple(blocks))


def _with_value(variable: Variable, values: Mapping[str, Any]) -> Variable:
    constant = variable.constant
    if constant is None or constant.value is not None:
        return variable
    if constant.digest not in values:
        raise ProgramError(f"no value for the constant {_named(variable)}")
    value = np.asarray(values[constant.digest])
    if make_constant(value) != constant:
        what = f"the value for the constant {_named(variable)} is another: {_type(value)}"
        raise ProgramError(what, hint="it was damaged, or comes from another program")
    return replace(variable, constant=Constant(constant.digest, value))


def _entries(program: Program) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the values to write, by digest."""
    entries: dict[str, np.ndarray[Any, Any]] = {}
    for variable in _constants(program):
        constant = _constant(variable)
        if constant.digest in entries or inline_values(variable) is not None:
            continue
        if constant.value is None:
            hint = "a program's text has no values; read it with load_program"
            raise ProgramError(f"the constant {_named(variable)} has no value to save", hint=hint)
        array = np.asarray(constant.value)
        if make_constant(array) != constant:
            hint = "make it with make_constant, and do not write to its array"
            raise ProgramError(f"the constant {_named(variable)} holds another value", hint=hint)
        entries[constant.digest] = array
    return entries


def _read_values(path: Path, digests: set[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the arrays under these digests, as far as present."""
    try:
        return read_arrays(path, digests)
    except FileNotFoundError:
        what = f"{len(digests)} constants have no values: there is no {path}"
        hint = "keep the .npz beside the text"
        raise ProgramError(what, hint=hint) from None
    except (OSError, ArrayFileError) as error:
        raise ProgramError(f"{path} is damaged: {error}", hint="save the program again") from error


def _constants(program: Program) -> Iterator[Variable]:
    for scope in (program.variables, *(block.variables for block in program.blocks)):
        yield from (variable for variable in scope.values() if variable.constant is not None)


def _constant(variable: Variable) -> Constant:
    assert variable.constant is not None
    return variable.constant


def _named(variable: Variable) -> str:
    return f"'{variable.name}' (@{_constant(variable).digest})"


def _type(array: np.ndarray[Any, Any]) -> str:
    return type_text(dtype_of(array), array.shape)


def _values_path(path: str | os.PathLike[str]) -> Path:
    values = Path(path).with_suffix(".npz")
    if values == Path(path):
        raise ProgramError(f"{path}: a program's text cannot have the suffix .npz")
    return values


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Provides the name of a new file, which replaces the path when it is complete and on disk."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield draft
        _sync(draft)
        draft.replace(path)
        _sync(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
