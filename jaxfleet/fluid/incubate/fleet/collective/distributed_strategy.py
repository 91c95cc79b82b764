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
        dist_fc_config: acts as `use_dist_fc`, to which it belongs: refused with it.
        forward_recompute: acts: backward computes forward again, from checkpoint to checkpoint.
        recompute_checkpoints: acts: the variables that are kept, or their names.
        use_amp: acts: products are in float16, and the loss has a dynamic scale.
        amp_loss_scaling: acts: what that scale begins with.
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
        *(
            "use_local_sgd",
            "use_dist_fc",
            "dist_fc_config",
            "mode",
            "collective_mode",
            "exec_strategy",
        ),
        *("_ut4grad_allreduce", "forward_recompute", "recompute_checkpoints"),
        *("use_amp", "amp_loss_scaling"),
    }

    def __init__(self) -> None:
        super().__init__()
        self.exec_strategy = ExecutionStrategy()
