"""What of a strategy is for devices of a mesh, and what does not go together there."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxfleet.errors import StrategyError

if TYPE_CHECKING:
    from jaxfleet.runtime.strategy import DistributedStrategy


def check_collective(strategy: "DistributedStrategy") -> None:
    """Refuses what devices of a mesh do, in other modes, and what does not go together there.

    Raises:
        StrategyError: it says which fields.
    """
    for what, hint in (*_types(strategy), *_of_other_modes(strategy), *_not_together(strategy)):
        raise StrategyError(what, hint=hint)


def _types(strategy: "DistributedStrategy") -> Iterator[tuple[str, str]]:
    if not isinstance(strategy.sharded, bool):
        what = f"strategy: sharded is {strategy.sharded!r}, but must be True or False"
        yield what, "True cuts the optimizer's state over all devices"
    if not isinstance(strategy.offload, bool | None):
        what = f"strategy: offload is {strategy.offload!r}, but must be True, False or None"
        yield what, "True lets values wait in the memory of the host between executables"
    if not isinstance(strategy.adaptive, str):
        what = f"strategy: adaptive is {strategy.adaptive!r}, but must name a metric"
        yield what, "adaptive='loss', where the step returns {'loss': ...}"
    if strategy.hierarchical < 0 or strategy.hierarchical == 1:
        what = f"strategy: hierarchical is {strategy.hierarchical}"
        yield what, "a group has at least 2 devices; 0 makes no groups"


def _of_other_modes(strategy: "DistributedStrategy") -> Iterator[tuple[str, str]]:
    mode, how = strategy.mode, strategy.communication
    if mode == "pserver" and how == "local_sgd":
        what = "strategy: communication 'local_sgd' in mode 'pserver'"
        yield what, "there it is communication='fl', or mode='collective'"
    if mode == "pserver" and strategy.amp:
        what = f"strategy: amp={strategy.amp!r} in mode 'pserver'"
        yield what, "amp is for the modes single and collective"
    for name, unless in (("sharded", False), ("hierarchical", 0), ("rings", 1)):
        if mode != "collective" and getattr(strategy, name) != unless:
            yield f"strategy: {name} in mode {mode!r}", f"{name} is for mode='collective'"


def _not_together(strategy: "DistributedStrategy") -> Iterator[tuple[str, str]]:
    if strategy.memory_budget is not None and strategy.lowering == "pmap":
        what = "strategy: memory_budget with lowering 'pmap'"
        yield what, "leave lowering out: what is cut into executables runs as shard_map"
    apart = strategy.communication == "local_sgd"
    for name, value in (("outer", strategy.outer is not None), ("adaptive", strategy.adaptive)):
        if value and not apart:
            what = f"strategy: {name} with communication {strategy.communication!r}"
            yield what, f"{name} is for communication='local_sgd'"
    if apart and strategy.rings > 1:
        what = "strategy: rings with communication 'local_sgd', which reduces no gradients"
        yield what, "leave rings out"
    if apart and strategy.sharded:
        what = "strategy: sharded with communication 'local_sgd'"
        yield what, "a device that trains by itself needs all of its state"
    for name, unless in (("hierarchical", 0), ("rings", 1)):
        if strategy.sharded and getattr(strategy, name) != unless:
            what = f"strategy: {name} with sharded, which has no all-reduces of gradients"
            yield what, "leave one of them out"
