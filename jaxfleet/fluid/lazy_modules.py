"""Modules at Paddle's paths whose names live in packages above fluid."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias

_GetAttr: TypeAlias = Callable[[str], Any]
_Dir: TypeAlias = Callable[[], list[str]]


def forward(module: str, target: str) -> tuple[_GetAttr, _Dir]:
    """Returns the `__getattr__` and `__dir__` of `module`, which forward to the module `target`.

    The target is imported when a name is first requested, so `import jaxfleet.fluid` does not load
    it, and fluid depends on nothing above it. A forwarding module lists its names for type
    checkers under `TYPE_CHECKING`, which pyproject.toml exempts from the layers.
    """

    def get(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(target), name)

    def names() -> list[str]:
        return [name for name in dir(import_module(target)) if not name.startswith("_")]

    return get, names
