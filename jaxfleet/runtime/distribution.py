"""`distribute`: from the user's step and a strategy to a distributed step."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from jaxfleet.analysis.step_checks import frozen_statistics_warning, repeated_key_warning
from jaxfleet.capture import Captured, capture
from jaxfleet.capture.gc_threshold import rare_collections
from jaxfleet.cluster import check_has_joined, joined
from jaxfleet.errors import StrategyError
from jaxfleet.ops.user_frames import warn_at_caller
from jaxfleet.runtime.argument_step import ArgumentStep, with_arguments
from jaxfleet.runtime.devices import choose_devices
from jaxfleet.runtime.rank_step import RankStep
from jaxfleet.runtime.step import Step
from jaxfleet.runtime.type_variables import Batch, Metrics, State
from jaxfleet.strategy import DistributedStrategy, as_strategy

if TYPE_CHECKING:
    from jaxfleet.runtime.pserver_entry import ServerStep
    from jaxfleet.runtime.trainer_step import TrainerStep

    _StateAndBatch: TypeAlias = Step | TrainerStep | ServerStep
    AnyStep: TypeAlias = _StateAndBatch | ArgumentStep
else:  # annotations stay readable by `typing.get_type_hints`
    _StateAndBatch = AnyStep = Any


@overload
def distribute(
    train_step: Callable[[State, Batch], tuple[State, Metrics]],
    example: tuple[State, Batch],
    strategy: DistributedStrategy | str | None = None,
    *,
    dump_dir: str | Path | None = None,
    name: str | None = None,
) -> "Step[State, Metrics] | TrainerStep[State, Metrics] | ServerStep[State, Metrics]": ...


@overload
def distribute(
    train_step: Callable[..., Any],
    example: tuple[Any, Any, Any, *tuple[Any, ...]],
    strategy: DistributedStrategy | str | None = None,
    *,
    dump_dir: str | Path | None = None,
    name: str | None = None,
) -> ArgumentStep: ...


def distribute(
    train_step: Callable[..., Any],
    example: tuple[Any, ...],
    strategy: DistributedStrategy | str | None = None,
    *,
    dump_dir: str | Path | None = None,
    name: str | None = None,
) -> AnyStep:
    """Compiles a one-device training step into a distributed one.

    The result computes what the step computes on one device with the whole batch: sums over the
    batch are completed over all devices wherever the program needs them complete.

    A step may take more than a state and a batch, and return it in another order::

        step = jf.distribute(train_step, example=(params, opt_state, x, y))
        params, opt_state, loss = step(params, opt_state, x, y)

        step = jf.distribute(train_step, example=(state, batch, rng))
        state, metrics = step(state, batch, rng)

    A result with the structure, shapes and types of an argument, in the same order, is that
    argument's new value, and its memory is reused. The first argument must be among them. Of the
    others those with rows are the batch; random keys, typed or not, and scalars are replicated on
    every device, and so is an argument whose leaves have no rows in common, such as a teacher's
    parameters. Pass another key at every call. `explain()` lists the class of each argument.

    Args:
        train_step: takes `(state, batch)` and returns `(state, metrics)`, or takes several
            arguments as above. Its optimizer is wrapped in `distributed_optimizer`.
        example: its arguments, or their types. Axis 0 of every batch leaf that has one is the
            global batch.
        strategy: a `DistributedStrategy`, or the name of a mode; by default `collective`.
        dump_dir: a directory for dumps of every pass.
        name: the program's name; by default the function's.

    Raises:
        CaptureError: the step cannot be captured.
        StrategyError: the strategy does not fit the machine, this process does not belong to a job,
            or it is a rank and has not joined the others.
        FeedError: the example's batch cannot be divided among the devices.
    """
    chosen = as_strategy(strategy)
    folder = Path(dump_dir) if dump_dir is not None else None
    if chosen.mode == "collective":
        _check_communication(chosen)
        check_has_joined()
    captured = capture(train_step, example=example, name=name)
    fixed = captured.arguments.fixed if captured.arguments is not None else ()
    leaves = [leaf.name for leaf in captured.signature.state]
    given = frozenset(name for name in leaves if name.split("/")[0] in fixed)
    for warning in (
        frozen_statistics_warning(captured.program),
        repeated_key_warning(captured.program, given=given),
    ):
        if warning is not None:
            warn_at_caller(warning)
    with rare_collections():
        made: AnyStep = with_arguments(_made(captured, chosen, folder), captured, example)
    return made


def _made(captured: Captured, strategy: DistributedStrategy, folder: Path | None) -> _StateAndBatch:
    if strategy.mode == "pserver":
        from jaxfleet.runtime.pserver_entry import job_step  # noqa: PLC0415  # other modes need no ps

        return job_step(captured, strategy, folder)
    if strategy.mode == "collective" and (here := joined()) is not None:
        return RankStep(captured, strategy, here, folder)
    devices = choose_devices(1 if strategy.mode == "single" else strategy.devices)
    return Step(captured, strategy, devices, folder)


def _check_communication(strategy: DistributedStrategy) -> None:
    """Rejects communication modes for trainers of servers.

    Not checked by the strategy itself: its mode may still change (`Twin` ignores it).
    """
    if strategy.communication not in {"sync", "local_sgd"}:
        what = f"communication {strategy.communication!r} is between trainers and servers"
        raise StrategyError(what, hint="mode='pserver'; devices of a mesh go together")
