"""Installs modules under their old names, and removes them."""

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from jaxfleet.compat.names import MODULES
from jaxfleet.errors import ProgramError


class Forward(ModuleType):
    """A module that forwards attributes to other modules.

    It is not an alias of them: otherwise `import paddle.fluid.x` would find `x` in this package's
    folder and import it a second time, under another name and with other classes.

    Args:
        name: the module's name in scripts.
        targets: the modules searched for an attribute, in order; imported at the first access.
    """

    def __init__(self, name: str, targets: Sequence[str]) -> None:
        super().__init__(name, f"Stands for {', '.join(targets) or 'what is in it'}.")
        self.__path__: list[str] = []  # a package, so that it may have submodules
        self._targets = tuple(targets)

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return [name for name in dir(self) if not name.startswith("_")]
        if name.startswith("__"):  # dunder attributes that the import system looks up
            raise AttributeError(name)
        for target in self._targets:
            module = import_module(target)
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(self._missing(name), name=name, obj=self)

    def __dir__(self) -> list[str]:
        own = (name for name in vars(self) if not name.startswith("_"))
        return sorted({*own, *(n for t in self._targets for n in dir(import_module(t)))})

    def _missing(self, name: str) -> str:
        near = difflib.get_close_matches(name, dir(self), n=3)
        said = f"did you mean {', '.join(near)}?" if near else "docs/fluid-differences.md lists why"
        return f"jaxfleet has no '{self.__name__}.{name}'; {said}"


def install() -> None:
    """Registers `paddle` and its submodules as forwards to jaxfleet's; idempotent.

    Raises:
        ProgramError: another `paddle` has been imported.
    """
    known = sys.modules.get("paddle")
    if isinstance(known, Forward):
        return
    if known is not None:
        where = getattr(known, "__file__", None) or "a module without a file"
        hint = "call jaxfleet.compat.install() before anything imports paddle"
        raise ProgramError(f"another paddle has been imported: {where}", hint=hint)
    for name, targets in MODULES.items():  # packages before their submodules
        module = Forward(name, targets)
        sys.modules[name] = module
        package, _, last = name.rpartition(".")
        if package:
            setattr(sys.modules[package], last, module)


def uninstall() -> None:
    """Removes the modules that `install` registered; objects imported from them stay valid."""
    for name in MODULES:
        if isinstance(sys.modules.get(name), Forward):
            del sys.modules[name]
