"""Saving and loading of variables: chosen ones, parameters, or all that outlive a run."""

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from jaxfleet.errors import SavedError
from jaxfleet.fluid.array_files import arrays_writer, file_of, read_arrays, write_files
from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.dtypes import VarType
from jaxfleet.fluid.executor import Executor
from jaxfleet.fluid.io.distributed import (
    is_first_trainers,
    is_servers,
    served_values,
    server_slices,
    tables_elsewhere,
)
from jaxfleet.fluid.io.tables import saved_tables_of, server_rows
from jaxfleet.fluid.io.values import check_value, set_values, value_of
from jaxfleet.fluid.program import Program, default_main_program
from jaxfleet.fluid.scope import global_scope
from jaxfleet.fluid.variable import Parameter, Variable

Predicate: TypeAlias = Callable[[Variable], bool]
Folder: TypeAlias = str | os.PathLike[str]

_WITHOUT_VALUE = frozenset({VarType.RAW, VarType.READER, VarType.STEP_SCOPES})


def is_parameter(var: Variable) -> bool:
    """Tells whether a variable is trained."""
    return isinstance(var, Parameter)


def is_persistable(var: Variable) -> bool:
    """Tells whether a variable outlives a run, and holds an array."""
    return var.persistable and var.type not in _WITHOUT_VALUE


def is_belong_to_optimizer(var: Variable) -> bool:
    """Tells whether a variable outlives a run and is no parameter."""
    return is_persistable(var) and not isinstance(var, Parameter) and not var.need_check_feed


def get_program_parameter(program: Program) -> list[Variable]:
    """Returns the parameters of a program."""
    return [v for v in program.list_vars() if is_parameter(v)]


def get_program_persistable_vars(program: Program) -> list[Variable]:
    """Returns the variables of a program that outlive a run."""
    return [v for v in program.list_vars() if is_persistable(v)]


def save_vars(
    executor: Executor,
    dirname: Folder,
    main_program: Program | None = None,
    vars: Sequence[Variable] | None = None,
    predicate: Predicate | None = None,
    filename: str | None = None,
) -> None:
    """Saves variables from the global scope.

    Args:
        executor: taken; values lie in the scope.
        dirname: the folder; made if it is not there.
        main_program: whose variables; the default main program unless given.
        vars: which.
        predicate: tells which, unless `vars` does.
        filename: one file for all; a file for each, named for it, unless given.

    Raises:
        TypeError: an argument is of another type.
        SavedError: a variable has no value, or a file cannot be written.
    """
    check_type(executor, "executor", Executor)
    chosen = _chosen(main_program, vars, predicate)
    if not chosen:
        warnings.warn("there is no variable to save", stacklevel=2)
        return
    write_values(_folder(dirname), filename, ((v.name, value_of(v)) for v in chosen))


def save_params(
    executor: Executor,
    dirname: Folder,
    main_program: Program | None = None,
    filename: str | None = None,
) -> None:
    """Saves the parameters that a program holds; see `save_vars`."""
    held = _held_by(program_of(main_program), is_parameter)
    save_vars(executor, dirname, main_program, None, held, filename)


def save_persistables(
    executor: Executor,
    dirname: Folder,
    main_program: Program | None = None,
    filename: str | None = None,
) -> None:
    """Saves all that outlives a run: parameters, states of optimizers; see `save_vars`.

    Of a job with servers, the first trainer saves besides what servers alone hold, as they have it
    after its last step. Servers write the rows of a distributed table themselves, in
    `__lookup_table__`.
    """
    check_type(executor, "executor", Executor)
    program = program_of(main_program)
    served, is_here = served_values(executor, program), _held_by(program)
    if not served:
        save_vars(executor, dirname, main_program, None, is_here, filename)
    else:
        kept = [v for v in _chosen(main_program, None, is_here) if v.name not in served]
        own = ((v.name, value_of(v)) for v in kept)
        write_values(_folder(dirname), filename, chain(own, served.items()))
    if is_first_trainers(program):
        executor._pserver.save_tables(program, _folder(dirname))


def load_vars(
    executor: Executor,
    dirname: Folder,
    main_program: Program | None = None,
    vars: Sequence[Variable] | None = None,
    predicate: Predicate | None = None,
    filename: str | None = None,
) -> None:
    """Loads variables into the global scope, all or none; arguments as of `save_vars`.

    Raises:
        TypeError: an argument is of another type.
        SavedError: a variable is not there, is damaged, or has another shape or dtype than the
            program says.
    """
    check_type(executor, "executor", Executor)
    chosen = _chosen(main_program, vars, predicate)
    folder = _folder(dirname)
    set_values(read_values(chosen, folder, filename))


def load_params(
    executor: Executor,
    dirname: Folder,
    main_program: Program | None = None,
    filename: str | None = None,
) -> None:
    """Loads the parameters that a program holds; see `load_vars`."""
    held = _held_by(program_of(main_program), is_parameter)
    load_vars(executor, dirname, main_program, None, held, filename)


def load_persistables(
    executor: Executor,
    dirname: Folder,
    main_program: Program | None = None,
    filename: str | None = None,
) -> None:
    """Loads all that outlives a run; see `load_vars`.

    A server's program takes its slices of what the first trainer has saved, and its rows of a
    distributed table; its startup program runs before.
    """
    program = program_of(main_program)
    if is_servers(program):
        check_type(executor, "executor", Executor)
        folder = _folder(dirname)
        slices, stores = server_slices(program, folder, filename), server_rows(program, folder)
        set_values(slices)
        global_scope().rows.update(stores)
        return
    load_vars(executor, dirname, main_program, None, _held_by(program), filename)


def _held_by(program: Program, kept: Predicate = is_persistable) -> Predicate:
    """Returns what tells what outlives a run where the program runs: no table of servers."""
    elsewhere = tables_elsewhere(program)
    return lambda var: kept(var) and var.name not in elsewhere


def read_values(
    variables: Sequence[Variable], folder: Path, filename: str | None
) -> dict[str, np.ndarray]:
    """Returns the saved values of variables, which fit them.

    Raises:
        SavedError: one is not there, is damaged, or does not fit.
    """
    if filename is not None:
        path = folder / filename
        arrays = read_arrays(path, [v.name for v in variables])
        absent = [v for v in variables if v.name not in arrays]
        return fitting(variables, arrays | saved_tables_of(absent, folder), str(path))
    found: dict[str, np.ndarray] = {}
    for variable in variables:
        path = file_of(folder, variable.name)
        is_there = path.exists()
        arrays = (
            read_arrays(path, [variable.name]) if is_there else saved_tables_of([variable], folder)
        )
        if not is_there and not arrays:
            hint = "was it saved for another program, or with a filename?"
            raise mistake(f"'{variable.name}' is not saved in {folder}", hint, SavedError)
        found |= fitting([variable], arrays, str(path))
    return found


def fitting(
    variables: Iterable[Variable], arrays: dict[str, np.ndarray], where: str
) -> dict[str, np.ndarray]:
    """Returns the arrays of variables, as a device takes them.

    Raises:
        SavedError: one is missing, or has another shape or dtype than the program says.
    """
    found = {}
    for variable in variables:
        if variable.name not in arrays:
            raise mistake(f"'{variable.name}' is not saved in {where}", kind=SavedError)
        found[variable.name] = check_value(variable, arrays[variable.name], where)
    return found


def program_of(given: Any) -> Program:
    """Returns the program that an argument means, a compiled one's own included.

    Raises:
        TypeError: it is none.
    """
    inner = default_main_program() if given is None else getattr(given, "_program", given)
    check_type(inner, "main_program", Program)
    program: Program = inner
    return program


def _chosen(
    main_program: Program | None, given: Sequence[Variable] | None, predicate: Predicate | None
) -> list[Variable]:
    program = program_of(main_program)
    if given is None:
        kept = is_persistable if predicate is None else predicate
        return [v for v in program.list_vars() if v.type not in _WITHOUT_VALUE and kept(v)]
    for variable in given:
        check_type(variable, "a member of vars", Variable)
    return list(given)


def write_values(
    folder: Path, filename: str | None, values: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Writes values by name: one file for all, or a file for each.

    Raises:
        SavedError: a file cannot be written.
    """
    if filename is not None:
        write_files([(folder / filename, arrays_writer(values))])
        return
    write_files((file_of(folder, name), arrays_writer([(name, value)])) for name, value in values)


def _folder(dirname: Folder) -> Path:
    check_type(dirname, "dirname", (str, os.PathLike))
    return Path(dirname)
