"""Saving and loading of variables: selected ones, parameters, or all persistable ones."""

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from jaxfleet.errors import SavedError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.executor import Executor
from jaxfleet.fluid.framework.program import Program, default_main_program
from jaxfleet.fluid.framework.types import VarType
from jaxfleet.fluid.framework.variable import Parameter, Variable
from jaxfleet.fluid.io.distributed import (
    is_first_trainer,
    is_server,
    saved_tables_of,
    served_values,
    server_rows,
    server_slices,
    tables_elsewhere,
)
from jaxfleet.fluid.npz_files import arrays_writer, file_of, read_arrays, write_files
from jaxfleet.fluid.scope import global_scope
from jaxfleet.ops.fluid.arrays import ON_DEVICE, device_dtype
from jaxfleet.ops.jax_adapter import numpy_dtype


def value_of(variable: Variable) -> np.ndarray:
    """Value of a variable in the global scope, in the declared dtype.

    Raises SavedError if there is no value, or one of another dtype.
    """
    name, scope = variable.name, global_scope()
    if name not in scope:
        hint = "run the startup program in this scope; what servers alone hold is saved there"
        raise mistake(f"'{name}' has no value in the scope, and cannot be saved", hint, SavedError)
    array = np.asarray(scope.peek(name))
    _check_dtype(variable, array, "the scope")
    return array.astype(numpy_dtype(variable.dtype), copy=False)


def check_value(variable: Variable, array: np.ndarray, where: str) -> np.ndarray:
    """Converts a value to the variable's dtype on the device.

    `where` names its source in the SavedError for a shape or dtype that differs from the declared
    one.
    """
    _check_shape(variable, array, where)
    _check_dtype(variable, array, where)
    narrow = array.astype(device_dtype(variable.dtype), copy=False)
    if array.dtype.kind in "iu" and not np.array_equal(narrow, array):
        what = f"'{variable.name}' in {where} holds numbers that do not fit in {narrow.dtype.name}"
        raise mistake(what, "integers are computed in 32 bits", SavedError)
    return narrow


def set_values(values: Mapping[str, np.ndarray]) -> None:
    """Sets variables in the global scope."""
    global_scope().keep({name: jnp.array(value, copy=True) for name, value in values.items()})


def _check_shape(variable: Variable, array: np.ndarray, where: str) -> None:
    declared: Sequence[int] = variable.shape
    fits = len(declared) == array.ndim and all(
        wanted in {-1, size} for wanted, size in zip(declared, array.shape, strict=True)
    )
    if not fits:
        what = f"'{variable.name}' has shape {list(array.shape)} in {where}"
        hint = "was it saved by another version of the model?"
        raise mistake(f"{what}, and {list(declared)} in the program", hint, SavedError)


def _check_dtype(variable: Variable, array: np.ndarray, where: str) -> None:
    if array.dtype.name not in {variable.dtype, ON_DEVICE.get(variable.dtype)}:
        what = f"'{variable.name}' is {array.dtype.name} in {where}"
        raise mistake(f"{what}, and {variable.dtype} in the program", kind=SavedError)


Predicate: TypeAlias = Callable[[Variable], bool]
Folder: TypeAlias = str | os.PathLike[str]

_WITHOUT_VALUE = frozenset({VarType.RAW, VarType.READER, VarType.STEP_SCOPES})


def is_parameter(var: Variable) -> bool:
    """Whether a variable is trained."""
    return isinstance(var, Parameter)


def is_persistable(var: Variable) -> bool:
    """Whether a variable is a persistable array."""
    return var.persistable and var.type not in _WITHOUT_VALUE


def is_belong_to_optimizer(var: Variable) -> bool:
    """Whether a variable is persistable and not a parameter."""
    return is_persistable(var) and not isinstance(var, Parameter) and not var.need_check_feed


def get_program_parameter(program: Program) -> list[Variable]:
    """Parameters of a program."""
    return [v for v in program.list_vars() if is_parameter(v)]


def get_program_persistable_vars(program: Program) -> list[Variable]:
    """Persistable variables of a program."""
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
        executor: no effect; values are in the scope.
        dirname: the folder; created if missing.
        main_program: has the variables; the default main program unless given.
        vars: variables to save.
        predicate: selects the variables if `vars` is not given.
        filename: one file for all; unless given, a file for each, of its name.

    Raises:
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
    """Saves a program's parameters; see `save_vars`."""
    held = _held_by(program_of(main_program), is_parameter)
    save_vars(executor, dirname, main_program, None, held, filename)


def save_persistables(
    executor: Executor,
    dirname: Folder,
    main_program: Program | None = None,
    filename: str | None = None,
) -> None:
    """Saves persistable variables: parameters and optimizer state; see `save_vars`.

    In a job with servers, the first trainer also saves the servers' state after its last step.
    Servers write the rows of distributed tables themselves, to `__lookup_table__`.
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
    if is_first_trainer(program):
        executor._pserver.save_tables(program, _folder(dirname))


def load_vars(
    executor: Executor,
    dirname: Folder,
    main_program: Program | None = None,
    vars: Sequence[Variable] | None = None,
    predicate: Predicate | None = None,
    filename: str | None = None,
) -> None:
    """Loads variables into the global scope, all or none; the arguments are those of `save_vars`.

    Raises:
        SavedError: a variable is missing or damaged, or its shape or dtype differs from the
            declared one.
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
    """Loads a program's parameters; see `load_vars`."""
    held = _held_by(program_of(main_program), is_parameter)
    load_vars(executor, dirname, main_program, None, held, filename)


def load_persistables(
    executor: Executor,
    dirname: Folder,
    main_program: Program | None = None,
    filename: str | None = None,
) -> None:
    """Loads persistable variables; see `load_vars`.

    A server's program loads its slices of the first trainer's files, and its rows of distributed
    tables; its startup program must run before.
    """
    program = program_of(main_program)
    if is_server(program):
        check_type(executor, "executor", Executor)
        folder = _folder(dirname)
        slices, stores = server_slices(program, folder, filename), server_rows(program, folder)
        set_values(slices)
        global_scope().rows.update(stores)
        return
    load_vars(executor, dirname, main_program, None, _held_by(program), filename)


def _held_by(program: Program, kept: Predicate = is_persistable) -> Predicate:
    """Predicate of the persistable variables that the program's process holds: no server tables."""
    elsewhere = tables_elsewhere(program)
    return lambda var: kept(var) and var.name not in elsewhere


def read_values(
    variables: Sequence[Variable], folder: Path, filename: str | None
) -> dict[str, np.ndarray]:
    """Reads the saved values of variables.

    Raises SavedError if a value is missing, damaged or does not fit its variable.
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
    """Arrays of variables, converted by `check_value`; a missing one raises SavedError."""
    found = {}
    for variable in variables:
        if variable.name not in arrays:
            raise mistake(f"'{variable.name}' is not saved in {where}", kind=SavedError)
        found[variable.name] = check_value(variable, arrays[variable.name], where)
    return found


def program_of(given: Any) -> Program:
    """The program of an argument, which may be a compiled program."""
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
    """Writes values by name to one file for all, or a file for each."""
    if filename is not None:
        write_files([(folder / filename, arrays_writer(values))])
        return
    write_files((file_of(folder, name), arrays_writer([(name, value)])) for name, value in values)


def _folder(dirname: Folder) -> Path:
    check_type(dirname, "dirname", (str, os.PathLike))
    return Path(dirname)
