"""Models that are used: a program cut down to what its targets need, with its parameters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxfleet.errors import ProgramError, SavedError
from jaxfleet.fluid.array_files import (
    Writer,
    arrays_writer,
    bytes_writer,
    file_of,
    read_bytes,
    write_files,
)
from jaxfleet.fluid.block import Block
from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.deserialize import deserialize
from jaxfleet.fluid.executor import Executor
from jaxfleet.fluid.io.values import set_values, value_of
from jaxfleet.fluid.io.variables import (
    Folder,
    get_program_persistable_vars,
    program_of,
    read_values,
)
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.serialize import serialize
from jaxfleet.fluid.variable import Variable

MODEL = "__model__"


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
    """Saves what computes some targets from what is fed.

    Args:
        dirname: the folder; made if it is not there.
        feeded_var_names: names of variables that will be fed.
        target_vars: what will be fetched; none are needed where the whole program is saved.
        executor: taken; values lie in the scope.
        main_program: the default main program unless given; it stays as it is.
        model_filename: the program's file; `__model__` unless given.
        params_filename: one file for all variables; a file for each unless given.
        export_for_deployment: False saves the whole program, which can be trained on, as
            `__model__.main_program`.
        program_only: save no variables.

    Returns:
        The names of the targets.

    Raises:
        TypeError: an argument is of another type.
        ValueError: names are not texts, targets not variables, or the targets need data that is
            not fed.
        SavedError: a variable has no value, or a file cannot be written.
    """
    check_type(executor, "executor", Executor)
    fed, targets = (
        _fed(feeded_var_names),
        _targets(target_vars, may_be_none=not export_for_deployment),
    )
    program = program_of(main_program)
    model = Path(dirname) / (model_filename or MODEL)
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
    """Loads what `save_inference_model` saved, its variables into the global scope.

    Args:
        dirname: the folder.
        executor: taken; values lie in the scope.
        model_filename: the program's file; `__model__` unless given.
        params_filename: the file of all variables; a file for each unless given.
        pserver_endpoints: where tables of rows are looked up from now on.

    Returns:
        The program, the names of what is fed, the variables to fetch.

    Raises:
        ValueError: there is no such folder.
        SavedError: something is missing, damaged, or does not fit.
    """
    check_type(executor, "executor", Executor)
    folder = Path(dirname)
    if not folder.is_dir():
        raise mistake(f"'{dirname}' is no folder", "give that of save_inference_model")
    program, fed, names = model_of(folder / (model_filename or MODEL))
    set_values(read_values(get_program_persistable_vars(program), folder, params_filename))
    if pserver_endpoints:
        program._endpoints = list(pserver_endpoints)
    return [program, fed, [program.global_block().var(name) for name in names]]


def model_of(path: Path) -> tuple[Program, list[str], list[str]]:
    """Returns a saved program, the names of what it is fed, and those of its targets.

    Raises:
        SavedError: it is damaged, or no model.
    """
    try:
        program, more = deserialize(read_bytes(path), str(path))
        return program, [*more["feed"]], [*more["fetch"]]
    except KeyError as error:
        hint = "it is saved by save_inference_model"
        raise mistake(f"{path} is a program, and no model: {error}", hint, SavedError) from error
    except ProgramError as error:
        raise mistake(error.what, "save the model again", SavedError) from error


def _writers(program: Program, folder: Path, filename: str | None) -> list[tuple[Path, Writer]]:
    """Returns what writes the variables of a program."""
    kept = get_program_persistable_vars(program)
    if filename is not None:
        return [(folder / filename, arrays_writer((v.name, value_of(v)) for v in kept))]
    return [(file_of(folder, v.name), arrays_writer([(v.name, value_of(v))])) for v in kept]


def _for_use(program: Program, fed: list[str], targets: list[Variable]) -> Program:
    """Returns a copy with only what the targets need, told that it is used."""
    made = program._prune_with_input(fed, targets)._inference_optimize(prune_read_op=True)
    made._facts = {}  # it is no trainer's any more, and talks to nobody
    block = made.global_block()
    for name in fed:
        if block.has_var(name):
            block.var(name).is_data = True
    _check_fed(block, fed)
    for parameter in made.all_parameters():  # of no use any more, and may be a script's own
        parameter.regularizer = parameter.gradient_clip_attr = None
    for variable in made.list_vars():
        variable.error_clip = None
    return made


def _check_fed(block: Block, fed: list[str]) -> None:
    """Checks that all that operators read is fed, saved or computed."""
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
