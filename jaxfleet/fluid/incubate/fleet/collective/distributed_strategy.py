"""DistributedStrategy of the collective fleet: how ranks train together, and how each runs."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from jaxfleet.fluid.compiler import BuildStrategy, ExecutionStrategy

_OURS: Mapping[str, Any] = {
    "use_local_sgd": False,
    "use_dist_fc": False,
    "dist_fc_config": None,
    "mode": "nccl2",
    "collective_mode": None,
    "forward_recompute": False,
    "recompute_checkpoints": [],
    "use_amp": False,
    "amp_loss_scaling": 2.0**15,
    "exec_strategy": None,
    "_ut4grad_allreduce": False,
}


class LambConfig:
    """What Lamb is told; fluid's has nothing in it either."""


class DistFCConfig:
    """What a layer over ranks is told; fluid's has nothing in it either."""


class DistributedStrategy(BuildStrategy):
    """How ranks train together: a `BuildStrategy`, and more.

    Attributes:
        mode: `nccl2`, where compiled programs sum gradients; `collective`, where operators do.
        collective_mode: in the second, `grad_allreduce` or `local_sgd`.
        use_local_sgd: acts: `mode="collective"` with `local_sgd`.
        use_dist_fc: refused: a layer whose classes are over ranks.
        dist_fc_config: what such a layer is told.
        forward_recompute: checked, and acts on nothing: what is kept for backward is XLA's choice
            here, and that of `memory_optimize`.
        recompute_checkpoints: checked, as that.
        use_amp: checked, and acts on nothing: products are in float32.
        amp_loss_scaling: kept, as that.
        exec_strategy: how compiled programs run.
        _ut4grad_allreduce: acts: `mode="collective"` with `grad_allreduce`.
    """

    _defaults: ClassVar[Mapping[str, Any]] = {**BuildStrategy._defaults, **_OURS}
    _checks: ClassVar[Mapping[str, Callable[[Any], bool]]] = {
        **BuildStrategy._checks,
        **dict.fromkeys(_OURS, lambda _: True),  # an optimizer checks them, as fluid's does
        "exec_strategy": lambda value: isinstance(value, ExecutionStrategy),
        "mode": lambda value: value in {"nccl2", "collective"},
    }
    _acting: ClassVar[frozenset[str]] = BuildStrategy._acting | {
        *("use_local_sgd", "use_dist_fc", "mode", "collective_mode", "exec_strategy"),
        "_ut4grad_allreduce",
    }

    def __init__(self) -> None:
        super().__init__()
        self.exec_strategy = ExecutionStrategy()
