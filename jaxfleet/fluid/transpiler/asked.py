"""Checks of what a transpiler is asked for, with the script's line."""

from collections.abc import Sequence
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


def rank_endpoints(trainers: str | Sequence[str]) -> list[str]:
    """Returns the endpoints of ranks, which are given in a list or between commas.

    Raises:
        ProgramError: one is none, or two ranks have the same.
    """
    given = trainers.split(",") if isinstance(trainers, str) else trainers
    endpoints = [endpoint.strip() for endpoint in given]
    for place, endpoint in enumerate(endpoints):
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal():
            raise mistake(f"'{endpoint}' is no endpoint", "spell it host:port")
        if endpoint in endpoints[:place]:
            raise mistake(f"two ranks have the endpoint {endpoint}", "give each its own")
    return endpoints


def check_among(current: str, endpoints: Sequence[str]) -> None:
    """Checks that a process is one of those that train together.

    Raises:
        ProgramError: it is not.
    """
    if current not in endpoints:
        what = f"current_endpoint is {current}, which none of {', '.join(endpoints)} is"
        raise mistake(what, "spell it as in trainers")
