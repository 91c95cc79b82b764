"""Options of passes: their types and defaults, checks of given values, and their text."""

import difflib
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from jaxfleet.errors import PassError
from jaxfleet.ir.printer import attr_text, name_text
from jaxfleet.pipeline.base import Pass

_MISFIT = object()


@dataclass(frozen=True)
class Option:
    """One option of a pass.

    Attributes:
        name: the field's name.
        type: the field's annotation: int, float, bool, str, None, and tuples and unions of these.
        default: the field's default, or `dataclasses.MISSING` if it is required.
    """

    name: str
    type: Any
    default: object

    def __str__(self) -> str:
        text = f"{self.name}: {_type_text(self.type)}"
        return text if self.default is MISSING else f"{text} = {option_text(self.default)}"


def options_of(cls: type[Pass]) -> tuple[Option, ...]:
    """Returns the options of a pass, in the order of its fields."""
    hints = get_type_hints(cls)
    found = []
    for field in fields(cls):
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        found.append(Option(field.name, hints[field.name], default))
    return tuple(found)


def checked_options(cls: type[Pass], values: Mapping[str, object]) -> dict[str, Any]:
    """Returns the values converted to the fields' types: an int for a float field becomes a float.

    Raises:
        PassError: an option is unknown, missing, or of the wrong type.
    """
    options = {option.name: option for option in options_of(cls)}
    checked: dict[str, Any] = {}
    for name, value in values.items():
        option = options.get(name)
        if option is None:
            raise _unknown(cls, name)
        checked[name] = _fitted(value, option.type)
        if checked[name] is _MISFIT:
            what = f"{cls.name}: option '{name}' is {_type_text(option.type)}"
            raise PassError(f"{what}, not {_shown(value)}", hint=_listing(cls))
    for option in options.values():
        if option.default is MISSING and option.name not in values:
            raise PassError(f"{cls.name}: option '{option.name}' is missing", hint=_listing(cls))
    return checked


def given_options(pass_: Pass) -> dict[str, object]:
    """Returns the options of a pass that are not at their defaults."""
    values = {option.name: getattr(pass_, option.name) for option in options_of(type(pass_))}
    defaults = {option.name: option.default for option in options_of(type(pass_))}
    return {name: value for name, value in values.items() if not _same(value, defaults[name])}


def option_text(value: object) -> str:
    """Returns an option's value as written in a pipeline: `8192`, `true`, `ps0`, `[1, 2]`."""
    if isinstance(value, str):
        return name_text(value)
    if isinstance(value, tuple):
        return "[" + ",".join(map(option_text, value)) + "]"
    scalar: Any = value
    return attr_text(scalar)


def _fitted(value: object, hint: Any) -> object:
    """Returns the value converted to the type, or `_MISFIT`."""
    if get_origin(hint) in {Union, types.UnionType}:
        fits = (_fitted(value, choice) for choice in get_args(hint))
        return next((found for found in fits if found is not _MISFIT), _MISFIT)
    if get_origin(hint) is tuple:
        return _fitted_tuple(value, get_args(hint))
    if hint is type(None):
        return value if value is None else _MISFIT
    if hint is float and type(value) is int:
        return float(value)
    return value if type(value) is hint else _MISFIT


def _fitted_tuple(value: object, hints: tuple[Any, ...]) -> object:
    if not isinstance(value, tuple | list):
        return _MISFIT
    if len(hints) == 2 and hints[1] is Ellipsis:
        hints = (hints[0],) * len(value)
    if len(hints) != len(value):
        return _MISFIT
    items = tuple(_fitted(item, hint) for item, hint in zip(value, hints, strict=True))
    return _MISFIT if any(item is _MISFIT for item in items) else items


def _same(value: object, default: object) -> bool:
    """Whether two values are equal and of one type, since in Python 1 == True."""
    return type(value) is type(default) and value == default


def _unknown(cls: type[Pass], name: str) -> PassError:
    known = [option.name for option in options_of(cls)]
    near = difflib.get_close_matches(name, known, n=3)
    listing = _listing(cls)
    hint = f"did you mean {' or '.join(near)}? {listing}" if near else listing
    return PassError(f"{cls.name}: no option '{name}'", hint=hint)


def _listing(cls: type[Pass]) -> str:
    options = ", ".join(map(str, options_of(cls)))
    return f"its options are {options}" if options else "it has no options"


def _shown(value: object) -> str:
    if isinstance(value, tuple | list):
        return "[" + ",".join(map(_shown, value)) + "]"
    plain = value is None or isinstance(value, str | int | float)
    return option_text(value) if plain else repr(value)


def _type_text(hint: Any) -> str:
    if get_origin(hint) in {Union, types.UnionType}:
        return " or ".join(_type_text(choice) for choice in get_args(hint))
    if get_origin(hint) is tuple:
        inner = ("..." if item is Ellipsis else _type_text(item) for item in get_args(hint))
        return f"[{', '.join(inner)}]"
    return "none" if hint is type(None) else str(getattr(hint, "__name__", hint))
