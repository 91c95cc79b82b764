"""Checks of values at run time that a library makes of a branch and a callback that raises.

`equinox.error_if`, on which diffrax rests, is such a branch. The callback itself is a function of
the process that traced it; its messages are data, which a program can hold.
"""

import inspect
from dataclasses import dataclass
from typing import Any

from jaxfleet.ops import jaxprs
from jaxfleet.ops.jaxprs import Equation

_RAISES = ("equinox._errors", "_error.<locals>.raises")


@dataclass(frozen=True)
class Check:
    """A branch that hands values on, or raises.

    Attributes:
        messages: what it may raise with.
        number: which of them: an input's place, or a literal.
        values: the places of the inputs that it hands on.
    """

    messages: tuple[str, ...]
    number: Any
    values: tuple[int, ...]


def check_of(eqn: Equation) -> Check | None:
    """Returns the check that an equation is, or None for any other equation."""
    if eqn.primitive.name != "cond" or len(eqn.params["branches"]) != 2:
        return None
    passing, failing = (jaxprs.open_jaxpr(branch)[0] for branch in eqn.params["branches"])
    if passing.eqns or not failing.eqns or any(map(jaxprs.is_literal, passing.outvars)):
        return None
    first = failing.eqns[0]
    messages = _messages(first)
    if messages is None:
        return None
    places = {variable: place for place, variable in enumerate(passing.invars, 1)}
    number = first.invars[0]
    if not jaxprs.is_literal(number):
        number = {variable: place for place, variable in enumerate(failing.invars, 1)}[number]
    return Check(messages, number, tuple(places[variable] for variable in passing.outvars))


def _messages(eqn: Equation) -> tuple[str, ...] | None:
    if eqn.primitive.name != "pure_callback":
        return None
    function: Any = getattr(eqn.params["callback"], "callback_func", None)
    names = (getattr(function, "__module__", ""), getattr(function, "__qualname__", ""))
    if names != _RAISES:
        return None
    return tuple(map(str, inspect.getclosurevars(function).nonlocals["msgs"]))
