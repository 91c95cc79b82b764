"""Checks of what a transpiler is asked for, with the script's line."""

from typing import Any

from jaxfleet.errors import AssertedError
from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.transpiler.config import LEAST_BLOCK_SIZE, DistributeTranspilerConfig
from jaxfleet.fluid.transpiler.ps_dispatcher import PSDispatcher, RoundRobin


def check_config(config: Any) -> None:
    """Checks a config.

    Raises:
        WrongTypeError: it is none.
        AssertedError: its block size is too small, or its dispatcher is none.
    """
    check_type(config, "config", DistributeTranspilerConfig)
    if config.min_block_size < LEAST_BLOCK_SIZE:
        what = f"min_block_size is {config.min_block_size}, and is at least {LEAST_BLOCK_SIZE}"
        raise mistake(what, "fluid's limit; jf.distribute knows none", AssertedError)
    method = config.split_method or RoundRobin
    if not (isinstance(method, type) and issubclass(method, PSDispatcher)):
        what = f"split_method is {method!r}, and must derive from PSDispatcher"
        raise mistake(what, "give the class, not an object of it", AssertedError)


def check_new(program: Any, what: str) -> None:
    """Checks that a program is one, and was not transpiled before.

    Raises:
        ProgramError: it was.
    """
    check_type(program, what, Program)
    if "role" in program._facts:
        role = program._facts["role"]
        hint = "build it anew, or transpile a clone made before"
        raise mistake(f"{what} was transpiled before, as a {role}'s", hint)


def trainers_of(trainers: Any, trainer_id: Any) -> int:
    """Returns how many trainers there are.

    Raises:
        ProgramError: it is no such number, or the trainer is none of them.
    """
    if isinstance(trainers, bool) or not isinstance(trainers, int) or trainers < 1:
        what = f"trainers is {trainers!r}, and with servers a number of at least 1"
        raise mistake(what, "config.mode = 'nccl2' takes endpoints")
    if not isinstance(trainer_id, int) or not 0 <= trainer_id < trainers:
        what = f"trainer_id is {trainer_id!r}, and there are {trainers} trainers"
        raise mistake(what, "number them from 0")
    return trainers


def endpoints_of(pservers: Any) -> tuple[str, ...]:
    """Returns the endpoints of servers.

    Raises:
        WrongTypeError: they are not given as one string.
    """
    hint = "give them with commas between: '10.0.0.1:6174,10.0.0.2:6174'"
    check_type(pservers, "pservers", str, hint)
    return tuple(name.strip() for name in pservers.split(","))
