"""What a strategy makes of a user's step: on one device, on several, on all ranks', on servers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxfleet.capture import capture
from jaxfleet.errors import StrategyError
from jaxfleet.group import check_has_joined, joined
from jaxfleet.runtime.devices import choose_devices
from jaxfleet.runtime.processes import ServerStep, job_step
from jaxfleet.runtime.rank_step import RankStep
from jaxfleet.runtime.step import Step
from jaxfleet.runtime.strategy import DistributedStrategy, as_strategy
from jaxfleet.runtime.trainer_step import TrainerStep


def distribute(
    train_step: Callable[[Any, Any], tuple[Any, Any]],
    example: tuple[Any, Any],
    strategy: DistributedStrategy | str | None = None,
    *,
    dump_dir: str | Path | None = None,
    name: str | None = None,
) -> Step | TrainerStep | ServerStep:
    """Compiles a one-device training step into a distributed one.

    The result computes what the step computes on one device with the whole batch: sums over the
    batch are completed over all devices wherever the program needs them complete.

    Args:
        train_step: takes `(state, batch)` and returns `(state, metrics)`. Its optimizer is wrapped
            in `distributed_optimizer`.
        example: a state and a batch, or their types. Axis 0 of every batch leaf that has one is
            the global batch.
        strategy: a `DistributedStrategy`, or the name of a mode; `collective` unless given.
        dump_dir: a directory for dumps of what every pass did.
        name: the program's name; the function's, unless given.

    Raises:
        CaptureError: the step cannot be captured.
        StrategyError: the strategy does not fit the machine, this process is of no job, or it is
            a rank and has not joined the others.
        FeedError: the example's batch cannot be divided among the devices.
    """
    chosen = as_strategy(strategy)
    folder = Path(dump_dir) if dump_dir is not None else None
    if chosen.mode == "pserver":
        return job_step(capture(train_step, example=example, name=name), chosen, folder)
    if chosen.mode == "collective":
        _check_communication(chosen)
        check_has_joined()
    captured = capture(train_step, example=example, name=name)
    if chosen.mode == "collective" and (here := joined()) is not None:
        return RankStep(captured, chosen, here, folder)
    devices = choose_devices(1 if chosen.mode == "single" else chosen.devices)
    return Step(captured, chosen, devices, folder)


def _check_communication(strategy: DistributedStrategy) -> None:
    """Refuses what only trainers of servers do.

    Not where the strategy is made: its mode may still be another (`Twin` takes no notice of it).
    """
    if strategy.communication not in {"sync", "local_sgd"}:
        what = f"communication {strategy.communication!r} is between trainers and servers"
        raise StrategyError(what, hint="mode='pserver'; devices of a mesh go together")
