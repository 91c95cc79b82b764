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
    from jaxfleet import data as data
    from jaxfleet import fleet as fleet
    from jaxfleet import tables as tables
    from jaxfleet.capture import Captured as Captured
    from jaxfleet.capture import capture as capture
    from jaxfleet.capture import distributed_optimizer as distributed_optimizer
    from jaxfleet.capture import embedding_table as embedding_table
    from jaxfleet.cluster import initialize as initialize
    from jaxfleet.cluster import is_first as is_first
    from jaxfleet.cluster import rank as rank
    from jaxfleet.cluster import size as size
    from jaxfleet.cluster import split_files as split_files
    from jaxfleet.runtime import Executor as Executor
    from jaxfleet.runtime import Scope as Scope
    from jaxfleet.runtime import Step as Step
    from jaxfleet.runtime import TrainingStep as TrainingStep
    from jaxfleet.runtime import Twin as Twin
    from jaxfleet.runtime import distribute as distribute
    from jaxfleet.runtime import emulate_devices as emulate_devices
    from jaxfleet.runtime import memory_optimize as memory_optimize
    from jaxfleet.runtime import release_memory as release_memory
    from jaxfleet.runtime import verify as verify
    from jaxfleet.strategy import DistributedStrategy as DistributedStrategy

    __version__: str

# Module of each public name, imported on first access: the command line, the launcher and the guard
# of a process need neither JAX nor the compiler. `tests/test_public_names.py` compares this table
# with the imports above, which type checkers read.
_HOMES = {
    "jaxfleet.capture": (
        "Captured",
        "capture",
        "distributed_optimizer",
        "embedding_table",
    ),
    "jaxfleet.cluster": ("initialize", "is_first", "rank", "size", "split_files"),
    "jaxfleet.runtime": (
        "Executor",
        "Scope",
        "Step",
        "TrainingStep",
        "Twin",
        "distribute",
        "emulate_devices",
        "memory_optimize",
        "release_memory",
        "verify",
    ),
    "jaxfleet.strategy": ("DistributedStrategy",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_PACKAGES = ("data", "fleet", "tables")


class _Package(_ModuleType):
    """Keeps `capture` bound to the function although a subpackage has the same name.

    The import system sets every imported subpackage as an attribute of its parent.
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
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  # slow to import

    try:
        return version(__name__)
    except PackageNotFoundError:  # a checkout that was not installed
        return "unknown"
