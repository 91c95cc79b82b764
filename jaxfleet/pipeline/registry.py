"""Passes: their base class, their options, and the registry by name, with plug-ins.

A package declares its passes in its `pyproject.toml`; once it is installed, the command line and
`strategy.passes` find them::

    [project.entry-points."jaxfleet.passes"]
    my_passes = "my_package.passes"  # a module whose import registers them
"""

import difflib
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from jaxfleet.errors import PassError
from jaxfleet.ir import Operator, Program
from jaxfleet.ir.printer import attr_text, name_text


@dataclass(frozen=True)
class Pass(ABC):
    """Rewrites programs. A subclass is a frozen dataclass whose fields are the pass's options.

    Attributes:
        name: its name in pipelines and dumps, set by `register_pass`.
        runs_after: passes that must not come later in the same pipeline. They may be absent, since
            a program can be the printed output of an earlier pipeline; a pass itself checks its
            program for what it requires.
    """

    name: ClassVar[str] = ""
    runs_after: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def run(self, program: Program) -> Program:
        """Returns the rewritten program, and leaves its argument unchanged.

        Both are valid. Operators that the pass inserts are marked with `made_by`, so that dumps can
        name it.
        """


def made_by(op: Operator, pass_: Pass) -> Operator:
    """Returns the operator with the pass recorded in its source as its maker.

    The user's source line stays: give the operator the source of the one it serves.
    """
    return replace(op, source=replace(op.source, made_by=pass_.name))


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


_MISFIT = object()


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


GROUP = "jaxfleet.passes"


@cache
def load_plugins() -> tuple[str, ...]:
    """Imports every installed plug-in, once per process, and returns their names.

    Raises:
        PassError: a plug-in cannot be imported; the error names its package.
    """
    found = entry_points(group=GROUP)
    for plugin in found:
        try:
            plugin.load()
        except Exception as error:
            package = plugin.dist.name if plugin.dist is not None else "an installed package"
            raise PassError(
                f"passes of {package} cannot be loaded: {plugin.value}: {error}",
                hint=f"repair or uninstall it; it is announced under '{GROUP}' as {plugin.name}",
            ) from error
    return tuple(sorted(plugin.name for plugin in found))


_PASSES: dict[str, type[Pass]] = {}
_Class = TypeVar("_Class", bound=type[Pass])


def register_pass(name: str) -> Callable[[_Class], _Class]:
    """Registers the decorated class under a name.

    Raises:
        PassError: the name is taken or not an identifier.
    """

    def register(cls: _Class) -> _Class:
        if not name.isidentifier():
            raise PassError(f"a pass cannot be named '{name}'", hint="use letters, digits and _")
        taken = _PASSES.get(name)
        if taken is not None:
            raise PassError(f"pass '{name}' is registered twice: {taken.__qualname__} has the name")
        cls.name = name
        _PASSES[name] = cls
        return cls

    return register


def registered_passes() -> Mapping[str, type[Pass]]:
    """Returns the passes registered so far, by name; importing jaxfleet.passes registers ours."""
    return MappingProxyType(dict(sorted(_PASSES.items())))


def make_pass(name: str, options: Mapping[str, object] | None = None) -> Pass:
    """Returns a pass by name, with these options and defaults for the others.

    Raises:
        PassError: no such pass, no such option, or a value of the wrong type.
    """
    if name not in _PASSES:
        load_plugins()
    cls = _PASSES.get(name)
    if cls is None:
        raise PassError(f"no pass '{name}'", hint=_nearest(name))
    return cls(**checked_options(cls, options or {}))


def _nearest(name: str) -> str:
    if not _PASSES:
        return "none are registered: import jaxfleet.passes"
    near = difflib.get_close_matches(name, _PASSES, n=3)
    known = f"the passes are {', '.join(sorted(_PASSES))}"
    return f"did you mean {' or '.join(near)}? {known}" if near else known
