"""A module under an old name, whose names are looked up elsewhere when they are asked for."""

import difflib
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any


class Forward(ModuleType):
    """A module that has what others have.

    It is no alias of them: `import paddle.fluid.x` then looks for no `x` in our own folder, where
    it would be imported a second time, under another name and with other classes.

    Args:
        name: what scripts import.
        targets: the modules that are asked for a name, in order. They are imported when the first
            name is asked for.
    """

    def __init__(self, name: str, targets: Sequence[str]) -> None:
        super().__init__(name, f"Stands for {', '.join(targets) or 'what is in it'}.")
        self.__path__: list[str] = []  # a package, so that it may have submodules
        self._targets = tuple(targets)

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return [name for name in dir(self) if not name.startswith("_")]
        if name.startswith("__"):  # what Python itself asks of a module
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
