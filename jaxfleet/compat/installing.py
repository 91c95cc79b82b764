"""Installs modules under their old names, and removes them; lists the target of each name."""

import difflib
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from jaxfleet.errors import ProgramError

_FLUID = "jaxfleet.fluid"
_LAYERS = (f"{_FLUID}.layers",)
_TRANSPILER = f"{_FLUID}.transpiler"
_DETAILS = f"{_TRANSPILER}.details"
_SERVERS = f"{_FLUID}.incubate.fleet.parameter_server"
_PSLIB = f"{_SERVERS}.pslib"
_DYGRAPH = ("jaxfleet.compat.dygraph",)
_FRAMEWORK = (f"{_FLUID}.framework",)

# Modules of `paddle.fluid` that are modules of `jaxfleet.fluid` of the same name.
_SAME = """
    backward clip communicator compiler contrib contrib.mixed_precision core data_feeder dataset
    device_worker distribute_lookup_table distributed distributed.ps_pb2 executor framework
    incubate incubate.fleet incubate.fleet.base incubate.fleet.base.role_maker
    incubate.fleet.base.fleet_base incubate.fleet.collective incubate.fleet.utils
    incubate.fleet.utils.fleet_barrier_util incubate.fleet.utils.fs
    incubate.fleet.utils.fleet_util incubate.fleet.parameter_server
    incubate.fleet.parameter_server.distribute_transpiler
    incubate.fleet.parameter_server.distribute_transpiler.distributed_strategy
    incubate.fleet.parameter_server.pslib initializer io layer_helper layers lod_tensor metrics
    nets op optimizer param_attr parallel_executor profiler regularizer trainer_desc
    trainer_factory transpiler transpiler.collective transpiler.details unique_name
"""
_OF_LAYERS = "learning_rate_scheduler loss metric_op nn ops tensor"
_OTHERS: Mapping[str, tuple[str, ...]] = {
    "paddle": ("jaxfleet.compat.paddle_names",),
    "paddle.compat": ("jaxfleet.compat.text",),
    "paddle.distributed": (),
    "paddle.distributed.fs_wrapper": (f"{_FLUID}.incubate.fleet.utils.fs",),
    "paddle.distributed.launch": ("jaxfleet.launch.paddle_launch",),
    "paddle.distributed.launch_ps": ("jaxfleet.launch.paddle_launch_ps",),
    "paddle.reader": (f"{_FLUID}.readers",),
    "paddle.optimizer": ("jaxfleet.compat.optimizer",),
    "paddle.regularizer": (f"{_FLUID}.regularizer",),
    "paddle.static": (_FLUID,),
    "paddle.static.nn": ("jaxfleet.compat.static_nn", f"{_FLUID}.layers"),
    "paddle.fluid": (_FLUID,),
    "paddle.fluid.contrib.mixed_precision.decorator": (f"{_FLUID}.contrib.mixed_precision",),
    "paddle.fluid.contrib.mixed_precision.fp16_lists": (f"{_FLUID}.contrib.mixed_precision",),
    "paddle.fluid.contrib.memory_usage_calc": (f"{_FLUID}.contrib",),
    "paddle.fluid.distributed.downpour": (f"{_FLUID}.distributed",),
    "paddle.fluid.distributed.node": (f"{_FLUID}.distributed",),
    "paddle.fluid.dygraph": _DYGRAPH,
    "paddle.fluid.dygraph.base": _DYGRAPH,
    "paddle.fluid.dygraph.container": _DYGRAPH,
    "paddle.fluid.dygraph.layers": _DYGRAPH,
    "paddle.fluid.dygraph.learning_rate_scheduler": _DYGRAPH,
    "paddle.fluid.dygraph.nn": _DYGRAPH,
    "paddle.fluid.dygraph.parallel": _DYGRAPH,
    "paddle.fluid.incubate.fleet.parameter_server.pslib.node": (_PSLIB,),
    "paddle.fluid.incubate.fleet.parameter_server.pslib.optimizer_factory": (_PSLIB,),
    "paddle.fluid.incubate.fleet.parameter_server.pslib.ps_pb2": (f"{_FLUID}.distributed.ps_pb2",),
    "paddle.fluid.input": (f"{_FLUID}.input", f"{_FLUID}.layers"),
    "paddle.fluid.layers.control_flow": (*_LAYERS, f"{_FLUID}.layers.control_flow"),
    "paddle.fluid.layers.device": ("jaxfleet.compat.device",),
    "paddle.fluid.layers.io": (*_LAYERS, f"{_FLUID}.layers.io"),
    "paddle.fluid.transpiler.details.checkport": (_DETAILS,),
    "paddle.fluid.transpiler.details.program_utils": (_DETAILS,),
    "paddle.fluid.transpiler.details.ufind": (_DETAILS,),
    "paddle.fluid.transpiler.details.vars_distributed": (_DETAILS,),
    "paddle.fluid.transpiler.distribute_transpiler": (
        _TRANSPILER,
        f"{_TRANSPILER}.distribute_transpiler",
        _DETAILS,
    ),
    "paddle.fluid.transpiler.geo_sgd_transpiler": (_TRANSPILER,),
    "paddle.fluid.transpiler.memory_optimization_transpiler": (_TRANSPILER,),
    "paddle.fluid.transpiler.ps_dispatcher": (_TRANSPILER,),
}
MODULES: Mapping[str, tuple[str, ...]] = dict(
    sorted(  # packages before their modules
        {
            **{f"paddle.fluid.{name}": (f"{_FLUID}.{name}",) for name in _SAME.split()},
            **{f"paddle.fluid.layers.{name}": _LAYERS for name in _OF_LAYERS.split()},
            **_OTHERS,
        }.items()
    )
)


class Forward(ModuleType):
    """A module that forwards attributes to other modules.

    It is not an alias of them: otherwise `import paddle.fluid.x` would find `x` in this package's
    folder and import it a second time, under another name and with other classes. The targets are
    searched for an attribute in order, and imported at the first access.
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
