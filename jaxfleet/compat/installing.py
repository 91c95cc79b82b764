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

# Packages before their modules.
MODULES: Mapping[str, tuple[str, ...]] = {
    "paddle": ("jaxfleet.compat.top",),
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
    "paddle.fluid.backward": (f"{_FLUID}.backward",),
    "paddle.fluid.clip": (f"{_FLUID}.clip",),
    "paddle.fluid.communicator": (f"{_FLUID}.communicator",),
    "paddle.fluid.compiler": (f"{_FLUID}.compiler",),
    "paddle.fluid.contrib": (f"{_FLUID}.contrib",),
    "paddle.fluid.contrib.mixed_precision": (f"{_FLUID}.contrib.mixed_precision",),
    "paddle.fluid.contrib.mixed_precision.decorator": (f"{_FLUID}.contrib.mixed_precision",),
    "paddle.fluid.contrib.mixed_precision.fp16_lists": (f"{_FLUID}.contrib.mixed_precision",),
    "paddle.fluid.contrib.memory_usage_calc": (f"{_FLUID}.contrib",),
    "paddle.fluid.core": (f"{_FLUID}.core",),
    "paddle.fluid.data_feeder": (f"{_FLUID}.data_feeder",),
    "paddle.fluid.dataset": (f"{_FLUID}.dataset",),
    "paddle.fluid.device_worker": (f"{_FLUID}.device_worker",),
    "paddle.fluid.distribute_lookup_table": (f"{_FLUID}.distribute_lookup_table",),
    "paddle.fluid.distributed": (f"{_FLUID}.distributed",),
    "paddle.fluid.distributed.downpour": (f"{_FLUID}.distributed",),
    "paddle.fluid.distributed.node": (f"{_FLUID}.distributed",),
    "paddle.fluid.distributed.ps_pb2": (f"{_FLUID}.distributed.ps_pb2",),
    "paddle.fluid.dygraph": _DYGRAPH,
    "paddle.fluid.dygraph.base": _DYGRAPH,
    "paddle.fluid.dygraph.container": _DYGRAPH,
    "paddle.fluid.dygraph.layers": _DYGRAPH,
    "paddle.fluid.dygraph.learning_rate_scheduler": _DYGRAPH,
    "paddle.fluid.dygraph.nn": _DYGRAPH,
    "paddle.fluid.dygraph.parallel": _DYGRAPH,
    "paddle.fluid.executor": (f"{_FLUID}.executor",),
    "paddle.fluid.framework": _FRAMEWORK,
    "paddle.fluid.incubate": (f"{_FLUID}.incubate",),
    "paddle.fluid.incubate.fleet": (f"{_FLUID}.incubate.fleet",),
    "paddle.fluid.incubate.fleet.base": (f"{_FLUID}.incubate.fleet.base",),
    "paddle.fluid.incubate.fleet.base.role_maker": (f"{_FLUID}.incubate.fleet.base.role_maker",),
    "paddle.fluid.incubate.fleet.base.fleet_base": (f"{_FLUID}.incubate.fleet.base.fleet_base",),
    "paddle.fluid.incubate.fleet.collective": (f"{_FLUID}.incubate.fleet.collective",),
    "paddle.fluid.incubate.fleet.utils": (f"{_FLUID}.incubate.fleet.utils",),
    "paddle.fluid.incubate.fleet.utils.fleet_barrier_util": (
        f"{_FLUID}.incubate.fleet.utils.fleet_barrier_util",
    ),
    "paddle.fluid.incubate.fleet.utils.fs": (f"{_FLUID}.incubate.fleet.utils.fs",),
    "paddle.fluid.incubate.fleet.utils.fleet_util": (f"{_FLUID}.incubate.fleet.utils.fleet_util",),
    "paddle.fluid.incubate.fleet.parameter_server": (_SERVERS,),
    "paddle.fluid.incubate.fleet.parameter_server.distribute_transpiler": (
        f"{_SERVERS}.distribute_transpiler",
    ),
    "paddle.fluid.incubate.fleet.parameter_server.distribute_transpiler.distributed_strategy": (
        f"{_SERVERS}.distribute_transpiler.distributed_strategy",
    ),
    "paddle.fluid.incubate.fleet.parameter_server.pslib": (_PSLIB,),
    "paddle.fluid.incubate.fleet.parameter_server.pslib.node": (_PSLIB,),
    "paddle.fluid.incubate.fleet.parameter_server.pslib.optimizer_factory": (_PSLIB,),
    "paddle.fluid.incubate.fleet.parameter_server.pslib.ps_pb2": (f"{_FLUID}.distributed.ps_pb2",),
    "paddle.fluid.initializer": (f"{_FLUID}.initializer",),
    "paddle.fluid.input": (f"{_FLUID}.input", f"{_FLUID}.layers"),
    "paddle.fluid.io": (f"{_FLUID}.io",),
    "paddle.fluid.layer_helper": (f"{_FLUID}.layer_helper",),
    "paddle.fluid.layers": _LAYERS,
    "paddle.fluid.layers.control_flow": (*_LAYERS, f"{_FLUID}.layers.control_flow"),
    "paddle.fluid.layers.device": ("jaxfleet.compat.device",),
    "paddle.fluid.layers.io": (*_LAYERS, f"{_FLUID}.layers.io"),
    "paddle.fluid.layers.learning_rate_scheduler": _LAYERS,
    "paddle.fluid.layers.loss": _LAYERS,
    "paddle.fluid.layers.metric_op": _LAYERS,
    "paddle.fluid.layers.nn": _LAYERS,
    "paddle.fluid.layers.ops": _LAYERS,
    "paddle.fluid.layers.tensor": _LAYERS,
    "paddle.fluid.lod_tensor": (f"{_FLUID}.lod_tensor",),
    "paddle.fluid.metrics": (f"{_FLUID}.metrics",),
    "paddle.fluid.nets": (f"{_FLUID}.nets",),
    "paddle.fluid.op": (f"{_FLUID}.op",),
    "paddle.fluid.optimizer": (f"{_FLUID}.optimizer",),
    "paddle.fluid.param_attr": (f"{_FLUID}.param_attr",),
    "paddle.fluid.parallel_executor": (f"{_FLUID}.parallel_executor",),
    "paddle.fluid.profiler": (f"{_FLUID}.profiler",),
    "paddle.fluid.regularizer": (f"{_FLUID}.regularizer",),
    "paddle.fluid.trainer_desc": (f"{_FLUID}.trainer_desc",),
    "paddle.fluid.trainer_factory": (f"{_FLUID}.trainer_factory",),
    "paddle.fluid.transpiler": (_TRANSPILER,),
    "paddle.fluid.transpiler.collective": (f"{_TRANSPILER}.collective",),
    "paddle.fluid.transpiler.details": (_DETAILS,),
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
    "paddle.fluid.unique_name": (f"{_FLUID}.unique_name",),
}


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
