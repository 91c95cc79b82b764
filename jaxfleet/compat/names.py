"""Which module each old name stands for."""

from collections.abc import Mapping

_FLUID = "jaxfleet.fluid"
_LAYERS = (f"{_FLUID}.layers",)
_TRANSPILER = f"{_FLUID}.transpiler"
_DETAILS = f"{_TRANSPILER}.details"
_SERVERS = f"{_FLUID}.incubate.fleet.parameter_server"
_PSLIB = f"{_SERVERS}.pslib"
_FRAMEWORK = (f"{_FLUID}.framework",)

# A package stands before its modules.
MODULES: Mapping[str, tuple[str, ...]] = {
    "paddle": ("jaxfleet.compat.top",),
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
    "paddle.fluid.compiler": (f"{_FLUID}.compiler",),
    "paddle.fluid.core": (f"{_FLUID}.core",),
    "paddle.fluid.data_feeder": (f"{_FLUID}.data_feeder",),
    "paddle.fluid.dataset": (f"{_FLUID}.dataset",),
    "paddle.fluid.device_worker": (f"{_FLUID}.device_worker",),
    "paddle.fluid.distribute_lookup_table": (f"{_FLUID}.distribute_lookup_table",),
    "paddle.fluid.distributed": (f"{_FLUID}.distributed",),
    "paddle.fluid.distributed.downpour": (f"{_FLUID}.distributed",),
    "paddle.fluid.distributed.node": (f"{_FLUID}.distributed",),
    "paddle.fluid.distributed.ps_pb2": (f"{_FLUID}.distributed.descriptions",),
    "paddle.fluid.executor": (f"{_FLUID}.executor",),
    "paddle.fluid.framework": _FRAMEWORK,
    "paddle.fluid.incubate": (f"{_FLUID}.incubate",),
    "paddle.fluid.incubate.fleet": (f"{_FLUID}.incubate.fleet",),
    "paddle.fluid.incubate.fleet.base": (f"{_FLUID}.incubate.fleet.base",),
    "paddle.fluid.incubate.fleet.base.role_maker": (f"{_FLUID}.incubate.fleet.base.role_maker",),
    "paddle.fluid.incubate.fleet.base.fleet_base": (f"{_FLUID}.incubate.fleet.base.fleet_base",),
    "paddle.fluid.incubate.fleet.collective": (f"{_FLUID}.incubate.fleet.collective",),
    "paddle.fluid.incubate.fleet.utils": (f"{_FLUID}.incubate.fleet.utils",),
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
    "paddle.fluid.incubate.fleet.parameter_server.pslib.ps_pb2": (
        f"{_FLUID}.distributed.descriptions",
    ),
    "paddle.fluid.initializer": (f"{_FLUID}.initializer",),
    "paddle.fluid.input": (f"{_FLUID}.input", f"{_FLUID}.layers"),
    "paddle.fluid.io": (f"{_FLUID}.io",),
    "paddle.fluid.layer_helper": (f"{_FLUID}.layer_helper",),
    "paddle.fluid.layers": _LAYERS,
    "paddle.fluid.layers.control_flow": _LAYERS,
    "paddle.fluid.layers.io": _LAYERS,
    "paddle.fluid.layers.learning_rate_scheduler": _LAYERS,
    "paddle.fluid.layers.loss": _LAYERS,
    "paddle.fluid.layers.metric_op": _LAYERS,
    "paddle.fluid.layers.nn": _LAYERS,
    "paddle.fluid.layers.ops": _LAYERS,
    "paddle.fluid.layers.tensor": _LAYERS,
    "paddle.fluid.lod_tensor": (f"{_FLUID}.lod_tensor",),
    "paddle.fluid.nets": (f"{_FLUID}.nets",),
    "paddle.fluid.optimizer": (f"{_FLUID}.optimizer",),
    "paddle.fluid.param_attr": (f"{_FLUID}.param_attr",),
    "paddle.fluid.parallel_executor": (f"{_FLUID}.parallel_executor",),
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
        f"{_TRANSPILER}.op_roles",
        _DETAILS,
    ),
    "paddle.fluid.transpiler.memory_optimization_transpiler": (f"{_TRANSPILER}.memory",),
    "paddle.fluid.transpiler.ps_dispatcher": (_TRANSPILER,),
    "paddle.fluid.unique_name": (f"{_FLUID}.unique_name",),
}
