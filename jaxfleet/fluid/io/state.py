"""The whole training state under a prefix of file names: `fluid.save` and `fluid.load`."""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxfleet.errors import AssertedError, SavedError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.executor import Executor
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.serialization import serialize
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.io.variables import (
    check_value,
    fitting,
    get_program_parameter,
    get_program_persistable_vars,
    is_belong_to_optimizer,
    load_vars,
    program_of,
    set_values,
    value_of,
)
from jaxfleet.fluid.npz_files import arrays_writer, bytes_writer, file_of, read_arrays, write_files
from jaxfleet.fluid.scope import global_scope

PARAMETERS, OPTIMIZER, MODEL = ".pdparams", ".pdopt", ".pdmodel"


def save(program: Program, model_path: str) -> None:
    """Saves parameters, optimizer state and the program.

    Args:
        program: the program to save.
        model_path: `folder/name`, to which `.pdparams`, `.pdopt` and `.pdmodel` are appended.

    Raises:
        AssertionError: the path ends with a folder.
        SavedError: a variable has no value, or a file cannot be written.
    """
    check_type(program, "program", Program)
    check_type(model_path, "model_path", str)
    if not Path(model_path).name or model_path.endswith(("/", os.sep)):
        what = f"{model_path!r} names a folder, and no file in it"
        raise mistake(what, "give folder/name", AssertedError)
    parameters = ((v.name, value_of(v)) for v in get_program_parameter(program))
    state = ((v.name, value_of(v)) for v in program.list_vars() if is_belong_to_optimizer(v))
    write_files(
        [
            (Path(model_path + PARAMETERS), arrays_writer(parameters)),
            (Path(model_path + OPTIMIZER), arrays_writer(state)),
            (Path(model_path + MODEL), bytes_writer(serialize(program))),
        ]
    )


def load(
    program: Program,
    model_path: str,
    executor: Executor | None = None,
    var_list: Sequence[Variable] | None = None,
) -> None:
    """Loads files of `save`, `save_vars` and similar functions into the global scope.

    Args:
        program: has the variables to load.
        model_path: a prefix of `save`; or a folder, or a file of all variables.
        executor: needed for a folder or a file.
        var_list: variables to load; needed for a file.

    Raises:
        ValueError: an executor or a list is needed.
        SavedError: a file is missing, damaged or inconsistent with the program.
    """
    check_type(program, "program", Program)
    prefix = _prefix(model_path)
    if Path(prefix + PARAMETERS).exists():
        _load_state(program, prefix)
        return
    if executor is None:
        what = f"there is no {prefix}{PARAMETERS}"
        raise mistake(what, "to load what save_params and its like saved, give an executor")
    path = Path(model_path)
    if path.is_dir():
        chosen = list(program.list_vars()) if var_list is None else var_list
        load_vars(executor, path, vars=[v for v in chosen if file_of(path, v.name).is_file()])
        return
    if var_list is None:
        what = f"{model_path} is one file of variables, and var_list does not say which to load"
        raise mistake(what, "give var_list")
    load_vars(executor, path.parent, vars=var_list, filename=path.name)


def load_program_state(
    model_path: str, var_list: Sequence[Variable] | None = None
) -> dict[str, np.ndarray]:
    """Loads saved arrays by name, for use with `set_program_state`.

    Args:
        model_path: a prefix of `save`; or a folder, or a file, of `save_vars`.
        var_list: variables to load; all unless given.

    Raises:
        SavedError: a file is missing or damaged.
    """
    prefix, path = _prefix(model_path), Path(model_path)
    names = None if var_list is None else [v.name for v in var_list]
    if Path(prefix + PARAMETERS).exists():
        found = read_arrays(Path(prefix + PARAMETERS), names)
        state = Path(prefix + OPTIMIZER)
        return found | (read_arrays(state, names) if state.exists() else {})
    if not path.is_dir():
        return read_arrays(path, names)
    files = sorted(x for x in path.iterdir() if x.is_file() and not x.name.startswith("__model__"))
    chosen = files if names is None else [file_of(path, name) for name in names]
    return {name: value for file in chosen for name, value in read_arrays(file).items()}


def set_program_state(program: Program, state_dict: Mapping[str, Any]) -> None:
    """Sets the variables of a program, all or none; warns of unknown names.

    Raises:
        AssertionError: the startup program has not run.
        SavedError: a value's shape or dtype differs from the declared one.
    """
    kept = {v.name: v for v in get_program_persistable_vars(program_of(program))}
    for name in kept:
        if name not in global_scope():
            hint = "run the startup program in this scope"
            raise mistake(f"'{name}' has no value in the scope", hint, AssertedError)
    found = {name: np.asarray(state_dict[name]) for name in kept if name in state_dict}
    set_values({name: check_value(kept[name], x, "the state") for name, x in found.items()})
    if unused := sorted(state_dict.keys() - kept.keys()):
        warnings.warn(f"the program has no {', '.join(unused)}: not set", stacklevel=2)


def _load_state(program: Program, prefix: str) -> None:
    wanted = {PARAMETERS: get_program_parameter(program)}
    wanted[OPTIMIZER] = [v for v in program.list_vars() if is_belong_to_optimizer(v)]
    found: dict[str, np.ndarray] = {}
    for suffix, variables in wanted.items():
        path = Path(prefix + suffix)
        if variables and not path.exists():
            what = f"there is no {path}, and the program has '{variables[0].name}'"
            raise mistake(what, "was it saved before minimize?", SavedError)
        if variables:
            found |= fitting(variables, read_arrays(path), str(path))
    set_values(found)


def _prefix(model_path: str) -> str:
    check_type(model_path, "model_path", str)
    for suffix in (PARAMETERS, OPTIMIZER, MODEL):
        model_path = model_path.removesuffix(suffix)
    return model_path
