"""Saved programs: inference models, pruned to their targets, and whole training states.

A state is stored under a prefix of file names: `fluid.save` and `fluid.load`.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxfleet.errors import AssertedError, ProgramError, SavedError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.executor import Executor
from jaxfleet.fluid.framework.block import Block
from jaxfleet.fluid.framework.nested_sequences import levels_name
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.framework.serialization import deserialize, serialize
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.io.distributed import served_parameters, tables_elsewhere
from jaxfleet.fluid.io.variables import (
    Folder,
    check_value,
    fitting,
    get_program_parameter,
    get_program_persistable_vars,
    is_belong_to_optimizer,
    load_vars,
    program_of,
    read_values,
    set_values,
    value_of,
    write_values,
)
from jaxfleet.fluid.npz_files import (
    Writer,
    arrays_writer,
    bytes_writer,
    file_of,
    read_arrays,
    read_bytes,
    write_files,
)
from jaxfleet.fluid.scope import global_scope

MODEL_FILE = "__model__"


def save_inference_model(
    dirname: Folder,
    feeded_var_names: Sequence[str] | str,
    target_vars: Sequence[Variable] | Variable,
    executor: Executor,
    main_program: Program | None = None,
    model_filename: str | None = None,
    params_filename: str | None = None,
    export_for_deployment: bool = True,
    program_only: bool = False,
) -> list[str]:
    """Saves the part of a program that computes targets from fed variables.

    Args:
        dirname: the folder; created if missing.
        feeded_var_names: names of fed variables.
        target_vars: fetched variables; not needed if the whole program is saved.
        executor: no effect; values are in the scope.
        main_program: the default main program unless given; left unchanged.
        model_filename: the program's file; `__model__` unless given.
        params_filename: one file for all variables; a file for each unless given.
        export_for_deployment: False saves the whole program, for further training, as
            `__model__.main_program`.
        program_only: save no variables.

    Returns:
        The names of the targets.

    Raises:
        ValueError: names are not strings, targets not variables, or the targets need data that is
            not fed.
        SavedError: a variable has no value, or a file cannot be written.
    """
    check_type(executor, "executor", Executor)
    fed, targets = (
        _fed(feeded_var_names),
        _targets(target_vars, may_be_none=not export_for_deployment),
    )
    program = program_of(main_program)
    model = Path(dirname) / (model_filename or MODEL_FILE)
    names = [x.name for x in targets]
    if export_for_deployment:
        made = _for_use(program, fed, targets)
    else:
        made, model = program.clone(), model.with_name(f"{model.name}.main_program")
    written = serialize(made, more={"feed": fed, "fetch": names})
    writers = [(model, bytes_writer(written))]
    if not program_only:
        writers += _writers(made, Path(dirname), params_filename)
    write_files(writers)
    return names


def load_inference_model(
    dirname: Folder,
    executor: Executor,
    model_filename: str | None = None,
    params_filename: str | None = None,
    pserver_endpoints: Sequence[str] | None = None,
) -> list[Any]:
    """Loads a model of `save_inference_model`, with its variables into the global scope.

    Args:
        dirname: the folder.
        executor: no effect; values are in the scope.
        model_filename: the program's file; `__model__` unless given.
        params_filename: the file of all variables; a file for each unless given.
        pserver_endpoints: servers on which to look up tables.

    Returns:
        The program, the names of fed variables, the variables to fetch.

    Raises:
        ValueError: there is no such folder.
        SavedError: a file is missing, damaged or inconsistent.
    """
    check_type(executor, "executor", Executor)
    folder = Path(dirname)
    if not folder.is_dir():
        raise mistake(f"'{dirname}' is no folder", "give that of save_inference_model")
    program, fed, names = model_of(folder / (model_filename or MODEL_FILE))
    set_values(read_values(get_program_persistable_vars(program), folder, params_filename))
    if pserver_endpoints:
        program._endpoints = list(pserver_endpoints)
    return [program, fed, [program.global_block().var(name) for name in names]]


def model_of(path: Path) -> tuple[Program, list[str], list[str]]:
    """Reads a saved program, the names of its fed variables, and those of its targets."""
    try:
        program, more = deserialize(read_bytes(path), str(path))
        return program, [*more["feed"]], [*more["fetch"]]
    except KeyError as error:
        hint = "it is saved by save_inference_model"
        raise mistake(f"{path} is a program, and no model: {error}", hint, SavedError) from error
    except ProgramError as error:
        raise mistake(error.what, "save the model again", SavedError) from error


def _writers(program: Program, folder: Path, filename: str | None) -> list[tuple[Path, Writer]]:
    kept = get_program_persistable_vars(program)
    if filename is not None:
        return [(folder / filename, arrays_writer((v.name, value_of(v)) for v in kept))]
    return [(file_of(folder, v.name), arrays_writer([(v.name, value_of(v))])) for v in kept]


def _for_use(program: Program, fed: list[str], targets: list[Variable]) -> Program:
    """Copies the operators that the targets need, in test mode."""
    aside = [levels_name(name) for name in fed]  # fed beside variables of two levels
    given = [*fed, *(name for name in aside if program.global_block().has_var(name))]
    made = program._prune_with_input(given, targets)._inference_optimize(prune_read_op=True)
    made._facts = {}  # no longer a trainer's, so it does not communicate
    block = made.global_block()
    for name in given:
        if block.has_var(name):
            block.var(name).is_data = True
    _check_fed(block, given)
    for parameter in made.all_parameters():  # unused, and possibly an object of the script
        parameter.regularizer = parameter.gradient_clip_attr = None
    for variable in made.list_vars():
        variable.error_clip = None
    return made


def _check_fed(block: Block, fed: list[str]) -> None:
    """Checks that all variables that operators read are fed, saved or computed."""
    known = {*fed, *(v.name for v in block.vars.values() if v.persistable)}
    known.update(name for op in block.ops for name in op.output_arg_names)
    for op in block.ops:
        for name in op.input_arg_names:
            if name not in known:
                what = f"'{name}' is read, and neither fed nor computed"
                raise ProgramError(what, op=op, hint="name it among feeded_var_names")


def _fed(given: Sequence[str] | str) -> list[str]:
    many = [given] if isinstance(given, str) else list(given or ())
    if not all(isinstance(name, str) for name in many):
        raise mistake("feeded_var_names are not all texts", "give the names of what is fed")
    return many


def _targets(given: Sequence[Variable] | Variable, *, may_be_none: bool) -> list[Variable]:
    many = [given] if isinstance(given, Variable) else list(given or ())
    if not (many or may_be_none) or not all(isinstance(x, Variable) for x in many):
        raise mistake("target_vars are not Variables, one or many", "give what will be fetched")
    return many


def save_for_use(
    dirname: Folder,
    feeded_var_names: Sequence[str],
    target_vars: Sequence[Variable],
    executor: Executor,
    main_program: Program,
    *,
    trained: Program,
    export_for_deployment: bool = True,
) -> list[str]:
    """Saves an inference model with the parameters on servers; returns the names of its targets.

    `main_program` is the program before transpilation, and `trained` the trainer's made from it.
    With tables of rows, `dirname` is a folder that servers can access. Other arguments are those of
    `save_inference_model`.

    Raises:
        ProgramError: the trainer has not connected to its servers, or targets cannot be computed.
        PeerLostError: a server was lost or timed out.
        SavedError: a variable has no value, or a file cannot be written.
    """
    targets = save_inference_model(
        dirname,
        feeded_var_names,
        target_vars,
        executor,
        main_program,
        export_for_deployment=export_for_deployment,
        program_only=True,
    )
    folder = Path(dirname)
    name = MODEL_FILE if export_for_deployment else f"{MODEL_FILE}.main_program"
    tables = tables_elsewhere(trained)
    model, _, _ = model_of(folder / name)
    wanted = {v.name: v for v in get_program_persistable_vars(model)}
    held = served_parameters(executor, trained, wanted.keys() - tables)
    here = wanted.keys() - tables - held.keys()
    own = {name: value_of(wanted[name]) for name in sorted(here)}
    write_values(folder, None, {**own, **held}.items())
    if tables & wanted.keys():
        executor._pserver.save_tables(trained, folder)
    return targets


PARAMETERS, OPTIMIZER, MODEL = ".pdparams", ".pdopt", ".pdmodel"


def save(program: Program, model_path: str) -> None:
    """Saves parameters, optimizer state and the program.

    `model_path` is `folder/name`, to which `.pdparams`, `.pdopt` and `.pdmodel` are appended.

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

    `model_path` is a prefix of `save`, or a folder or a file of `save_vars`; of `var_list`, or all.

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
