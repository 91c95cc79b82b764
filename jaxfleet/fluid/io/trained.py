"""Models of a job with servers: parameters are taken from servers when they are saved."""

from collections.abc import Sequence
from pathlib import Path

from jaxfleet.fluid.executor import Executor
from jaxfleet.fluid.io.distributed import served_parameters, tables_elsewhere
from jaxfleet.fluid.io.inference import MODEL, model_of, save_inference_model
from jaxfleet.fluid.io.values import value_of
from jaxfleet.fluid.io.variables import (
    Folder,
    get_program_persistable_vars,
    write_values,
)
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.variable import Variable


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
    """Saves what computes some targets from what is fed, as servers have its parameters now.

    Args:
        dirname: the folder; for tables of rows, one that servers see.
        feeded_var_names: what will be fed.
        target_vars: what will be fetched.
        executor: the one that trains.
        main_program: the program before it was transpiled.
        trained: the trainer's program that was made of it.
        export_for_deployment: False saves the whole program.

    Returns:
        The names of the targets.

    Raises:
        ProgramError: the trainer has not spoken with its servers, or targets cannot be computed.
        PeerLostError: a server went, or takes too long.
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
    name = MODEL if export_for_deployment else f"{MODEL}.main_program"
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
