"""Registry of passes by name, with those of plug-ins.

A package declares its passes in its `pyproject.toml`; once it is installed, the command line and
`strategy.passes` find them::

    [project.entry-points."jaxfleet.passes"]
    my_passes = "my_package.passes"  # a module whose import registers them
"""

import difflib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TypeVar

from jaxfleet.errors import PassError
from jaxfleet.pipeline.base import Pass
from jaxfleet.pipeline.options import checked_options

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
