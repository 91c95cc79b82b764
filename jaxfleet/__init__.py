"""Compiles a one-device JAX training program into a distributed one.

::

    import jaxfleet as jf

    tx = jf.distributed_optimizer(optax.adam(1e-3))
    step = jf.distribute(train_step, example=(state, batch), strategy="collective")
    state, metrics = step(state, batch)
"""

import sys as _sys
from importlib import import_module as _import_module
from importlib.util import find_spec as _find_spec
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from jaxfleet import fleet as fleet
    from jaxfleet import tables as tables
    from jaxfleet.capture import Captured as Captured
    from jaxfleet.capture import capture as capture
    from jaxfleet.capture import distributed_optimizer as distributed_optimizer
    from jaxfleet.capture import embedding_table as embedding_table
    from jaxfleet.group import initialize as initialize
    from jaxfleet.group import is_first as is_first
    from jaxfleet.group import rank as rank
    from jaxfleet.group import size as size
    from jaxfleet.group import split_files as split_files
    from jaxfleet.runtime import DistributedStrategy as DistributedStrategy
    from jaxfleet.runtime import Executor as Executor
    from jaxfleet.runtime import Scope as Scope
    from jaxfleet.runtime import Step as Step
    from jaxfleet.runtime import Twin as Twin
    from jaxfleet.runtime import distribute as distribute
    from jaxfleet.runtime import emulate_devices as emulate_devices
    from jaxfleet.runtime import memory_optimize as memory_optimize
    from jaxfleet.runtime import release_memory as release_memory
    from jaxfleet.runtime import verify as verify

    __version__: str

# Where each public name is, imported when it is first asked for: the command line, a launcher and
# a process's guard need neither JAX nor what compiles. `tests/test_public_names.py` holds this
# against the imports above, which type checkers read.
_HOMES = {
    "jaxfleet.capture": (
        "Captured",
        "capture",
        "distributed_optimizer",
        "embedding_table",
    ),
    "jaxfleet.group": ("initialize", "is_first", "rank", "size", "split_files"),
    "jaxfleet.runtime": (
        "DistributedStrategy",
        "Executor",
        "Scope",
        "Step",
        "Twin",
        "distribute",
        "emulate_devices",
        "memory_optimize",
        "release_memory",
        "verify",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_PACKAGES = ("fleet", "tables")


class _Package(_ModuleType):
    """This package, in which `capture` is the function although a package has its name too.

    The import system puts a package that it has imported into the one around it.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME_OF and isinstance(value, _ModuleType)):
            super().__setattr__(name, value)


_sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> _Any:
    if (home := _HOME_OF.get(name)) is not None:
        value = getattr(_import_module(home), name)
    elif name == "__version__":
        value = _version()
    elif not name.startswith("_") and _find_spec(f"{__name__}.{name}") is not None:
        value = _import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF, *_PACKAGES, "__version__"})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  # takes a while

    try:
        return version(__name__)
    except PackageNotFoundError:  # a checkout that was never installed
        return "unknown"
