"""What layers are called with, checked in one place: names of arguments, and where Variables go."""

import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

from jaxfleet.errors import WrongTypeError
from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.variable import Variable

P = ParamSpec("P")
R = TypeVar("R")
Kinds: TypeAlias = tuple[type, ...]

_AS_GIVEN: Mapping[Any, type] = {int: numbers.Integral, float: numbers.Real}  # numpy's too


def checked(layer: Callable[P, R]) -> Callable[P, R]:
    """Returns a layer that names the line of the script which calls it wrongly.

    An argument whose annotation has a `Variable` in it must be what the annotation says. The
    others are left to the layer.

    Raises:
        WrongTypeError: when called, if an argument is missing, unknown, or of another type.
    """
    signature = inspect.signature(layer)
    hints = typing.get_type_hints(layer)
    kinds = {name: found for name in signature.parameters if (found := _kinds(hints.get(name)))}
    name = layer.__name__

    @functools.wraps(layer)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            hint = f"its arguments are {', '.join(signature.parameters)}"
            raise mistake(f"{name}: {error}", hint, WrongTypeError) from None
        for argument, wanted in kinds.items():
            if argument in given:
                _check(f"'{argument}' of {name}", given[argument], wanted)
        return layer(*args, **kwargs)

    return call


def _check(what: str, value: Any, kinds: Kinds) -> None:
    if list in kinds and isinstance(value, list | tuple):
        for one in value:
            _check(what, one, kinds)
    else:
        check_type(value, what, kinds)


def _kinds(hint: Any) -> Kinds:
    """Returns the types that an annotation with a Variable in it allows; none for any other.

    A list stands for a sequence of what else there is.
    """
    parts = typing.get_args(hint) if _is_union(hint) else (hint,)
    found: set[type] = set()
    for part in parts:
        if typing.get_origin(part) is Sequence:
            inner = typing.get_args(part)[0]
            found |= {list, *(typing.get_args(inner) if _is_union(inner) else (inner,))}
        elif isinstance(part, type):
            found.add(part)
        else:
            return ()  # Any, or something that is not checked
    if Variable not in found or not all(isinstance(kind, type) for kind in found):
        return ()
    return tuple(_AS_GIVEN.get(kind, kind) for kind in sorted(found, key=_rank))


def _rank(kind: type) -> tuple[bool, str]:
    return kind is not Variable, kind.__name__


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in {typing.Union, types.UnionType}
