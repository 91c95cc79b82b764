"""Checks of what a script gives, with the line that gave it."""

import numpy as np

from jaxfleet.errors import JaxfleetError, ProgramError, WrongTypeError
from jaxfleet.ops.frames import line_of_caller


def check_type(
    given: object, what: str, kinds: type | tuple[type, ...], hint: str | None = None
) -> None:
    """Checks the type of one argument.

    Args:
        given: it.
        what: how the message names it: `the loss`.
        kinds: the types that it may have.
        hint: what to give.

    Raises:
        WrongTypeError: it has another.
    """
    if isinstance(given, kinds):
        return
    many = kinds if isinstance(kinds, tuple) else (kinds,)
    wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in many)
    message = f"{what} is of type {type(given).__name__}, not {wanted}"
    raise WrongTypeError(message, source=line_of_caller(), hint=hint)


def number(given: object, what: str) -> float:
    """Returns an argument that is to be a number, as a float.

    Args:
        given: it.
        what: how the message names it: `clip_norm`.

    Raises:
        WrongTypeError: it is none.
    """
    if isinstance(given, int | float | np.number):
        return float(given)
    message = f"{what} is of type {type(given).__name__}, not a number"
    raise WrongTypeError(message, source=line_of_caller())


def mistake(
    what: str, hint: str | None = None, kind: type[JaxfleetError] = ProgramError
) -> JaxfleetError:
    """Returns an error that points at the user's line."""
    return kind(what, source=line_of_caller(), hint=hint)
