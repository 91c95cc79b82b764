"""Checks of arguments with the caller's line, and the warning for arguments without effect.

Throughout the front end an argument acts, is rejected, or warns once that it has no effect, with
the reason. Only hints to a compiler are silent; `docs/fluid-arguments.md` lists all three.
"""

import numpy as np

from jaxfleet.errors import JaxfleetError, ProgramError, WrongTypeError
from jaxfleet.ops.user_frames import line_of_caller, warn_at_caller


def check_type(
    given: object, what: str, kinds: type | tuple[type, ...], hint: str | None = None
) -> None:
    """Raises WrongTypeError for an argument of the wrong type; `what` names it: `the loss`."""
    if isinstance(given, kinds):
        return
    many = kinds if isinstance(kinds, tuple) else (kinds,)
    wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in many)
    message = f"{what} is of type {type(given).__name__}, not {wanted}"
    raise WrongTypeError(message, source=line_of_caller(), hint=hint)


def number(given: object, what: str) -> float:
    """Returns a numeric argument as a float; errors name it by `what`: `clip_norm`."""
    if isinstance(given, int | float | np.number):
        return float(given)
    message = f"{what} is of type {type(given).__name__}, not a number"
    raise WrongTypeError(message, source=line_of_caller())


def mistake(
    what: str, hint: str | None = None, kind: type[JaxfleetError] = ProgramError
) -> JaxfleetError:
    """Returns an error that points at the user's line."""
    return kind(what, source=line_of_caller(), hint=hint)


_WARNED: set[str] = set()


def warn_no_effect(argument: str, reason: str) -> None:
    """Warns at the user's line that an argument has no effect, once per process and argument.

    `argument` is its name as the user wrote it, `BuildStrategy.remove_unnecessary_lock`, and
    `reason` gives the alternative if there is one.
    """
    if argument in _WARNED:
        return
    _WARNED.add(argument)
    warn_at_caller(f"{argument} has no effect here: {reason}")


def forget_warnings() -> None:
    """Makes every argument warn again; for tests."""
    _WARNED.clear()
