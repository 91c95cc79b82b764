"""DistributedStrategy: how a step is to be distributed."""

import dataclasses
import math
import operator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxfleet.analysis.placing import MAX_IMBALANCE, METHODS
from jaxfleet.errors import FinalError, StrategyError
from jaxfleet.runtime.collective_rules import check_collective

MODES = ("single", "collective", "pserver")
ALLREDUCES = ("auto", "ring", "exchange")
LOWERINGS = ("shard_map", "pmap")
COMMUNICATIONS = ("sync", "async", "half_async", "geo", "dc_asgd", "fl", "local_sgd")
_WHOLE = (
    "devices", "fuse_allreduce_bytes", "min_block_size", "send_cuts", "replay_bytes", "staleness",
    "k_steps", "merge", "hierarchical", "rings", "loss_scale_steps",
)  # fmt: skip
_NUMBERS = (
    "max_imbalance",
    "lost_after_s",
    "step_timeout_s",
    "connect_s",
    "delay_compensation",
    "loss_scale",
)
_UNLESS_GIVEN = ("devices", "staleness")  # None: chosen elsewhere


@dataclass(frozen=True, kw_only=True)
class DistributedStrategy:
    """Says how a training step is to be distributed.

    Attributes:
        mode: `single` runs on one device; `collective` cuts the batch over all devices; `pserver`
            cuts it over trainers, and keeps parameters and optimizer state on servers: processes
            that `jaxfleet launch` starts.
        devices: how many devices to use; all there are, unless given.
        lowering: `shard_map`, or `pmap` for those who want it spelled so.
        local_statistics: keep statistics of the batch (BatchNorm) per device, as is usual
            elsewhere; the whole batch's by default, which costs an all-reduce a layer.
        fuse_allreduce_bytes: join all-reduces up to this many bytes; 0 leaves each gradient its
            own, which is what XLA:CPU does best with on one machine's memory. Over processes small
            ones are joined all the same.
        allreduce: how devices add up: `ring` is the compiler's own; `exchange` swaps in pairs, on
            2, 4, 8 ... devices; `auto` exchanges on up to 4 CPU devices of several processes,
            where gloo's ring costs more (docs/collective.md), and leaves the rest to the compiler.
        donate: let the new state take the memory of the old; a state can then be used once.
        slice_var: servers: cut parameters into slices, one a server.
        min_block_size: servers: the fewest elements of a slice.
        dispatch: servers: `round_robin`, `hash_name` or `balanced`.
        max_imbalance: servers: the most that the fullest may hold, over the mean; 0: anything. By
            default 4: parts that a hash places by chance often make 2.
        send_cuts: trainers: send gradients in so many groups, each as soon as it is made.
        batch: trainers: what a step is called with is the whole batch, `global`, of which it takes
            its rows, or its own rows only, `local`.
        lost_after_s: a peer that sends no heartbeat for so many seconds is lost.
        step_timeout_s: the most seconds that a living peer may take over a step.
        connect_s: trainers: the most seconds until all servers have answered for the first time.
        replay_bytes: trainers: how many bytes of pushes to keep, for all servers together, to bring
            a server level that starts again; where they are more, servers write checkpoints. They
            write them before replay takes long, too, so far less is kept in steady state.
        communication: how trainers and servers go together (docs/relaxed-modes.md). `sync`: all
            wait for each other at every step, as one device. `async`: each trains on its own rows,
            and its gradients are applied as they come. `half_async`: the same, by the mean of
            `merge` gradients. `geo`: trainers update, and every `k_steps` exchange how far they
            went. `dc_asgd`: `async` with gradients corrected for the time that they took. `fl`:
            every `k_steps` parameters are averaged over all trainers. In the mode `collective`
            there are two: `sync`, and `local_sgd`, where every device trains by itself on its own
            rows, and every `k_steps` parameters are averaged over all.
        staleness: what a step computes with has all that every trainer sent of its steps up to this
            many before it; a trainer that is ahead waits. Chosen by `communication` unless given.
        k_steps: geo, fl, local_sgd: a trainer's steps from one exchange to the next.
        merge: async, half_async: the most gradients that are merged into one message. single,
            collective: so many calls to one update, by the mean of their gradients, which are
            added up and reduced once.
        delay_compensation: dc_asgd: how much a gradient is corrected.
        average: fl: every trainer counts alike (`trainers`), or each row that it trained on
            (`rows`).
        memory_budget: the most that a step may take besides its state, batch and results, on each
            device or trainer: bytes (an int), or a fraction (a float) of what it takes as it is
            (docs/memory.md). None: as xla makes it.
        offload: let values that are read much later wait in pinned memory of the host, between a
            step's executables (docs/memory.md). True: with a `memory_budget` before anything is
            computed again, and without one wherever `passes` cut the step. None: where nothing else
            meets a budget, on devices with memory of their own. False: never.
        sharded: collective: cut the optimizer's state over the devices; each updates its part of
            every parameter, and the parameters are gathered (ZeRO, stage 1).
        hierarchical: collective: reduce within groups of so many neighbouring devices, across the
            groups, and within again; 0: all at once.
        rings: collective: streams that gradients' all-reduces are dealt out to; joined are only
            those of one stream.
        amp: single, collective: compute products forward and backward in half precision,
            `bfloat16` or `float16`; the state stays as it is. With float16 backward is scaled, and
            a step whose gradients overflow changes nothing.
        loss_scale: float16: by how much, to begin with; it is halved at each overflow.
        loss_scale_steps: float16: after so many good steps it is doubled.
        outer: local_sgd: an optax optimizer that takes the mean of how far devices went as its
            gradient: `optax.sgd(0.7, momentum=0.9, nesterov=True)`. None: parameters are averaged.
        adaptive: local_sgd: the name of the metric that is the loss, such as `loss`: the further
            it has fallen, the more often devices meet; `k_steps` are the most. "": always k_steps.
        on_nonfinite: what happens where a metric of one number (the loss), or a gradient, is not
            finite: `warn` once, naming the step, some steps later (both travel with the step's
            results, so nothing waits for them); `raise` at that step, for which every step is
            waited for, and its new state read; or `skip`: warn, and have a step with a gradient
            that is not finite change nothing, which costs a sum over every gradient. Where devices
            or trainers train by themselves, the step of that one is left out; with `merge`, all
            calls of the update.
        passes: further passes to run at the end, as text: `fuse_allreduce{flat=true}`.
    """

    mode: Literal["single", "collective", "pserver"] = "collective"
    devices: int | None = None
    lowering: Literal["shard_map", "pmap"] = "shard_map"
    local_statistics: bool = False
    fuse_allreduce_bytes: int = 0
    allreduce: Literal["auto", "ring", "exchange"] = "auto"
    donate: bool = True
    slice_var: bool = True
    min_block_size: int = 8192
    dispatch: Literal["round_robin", "hash_name", "balanced"] = "round_robin"
    max_imbalance: float = MAX_IMBALANCE
    send_cuts: int = 1
    batch: Literal["global", "local"] = "global"
    lost_after_s: float = 10.0
    step_timeout_s: float = 600.0
    connect_s: float = 120.0
    replay_bytes: int = 1 << 28
    communication: Literal["sync", "async", "half_async", "geo", "dc_asgd", "fl", "local_sgd"] = (
        "sync"
    )
    staleness: int | None = None
    k_steps: int = 10
    merge: int = 1
    delay_compensation: float = 1.0
    average: Literal["trainers", "rows"] = "trainers"
    memory_budget: float | None = None
    offload: bool | None = None
    sharded: bool = False
    hierarchical: int = 0
    rings: int = 1
    amp: Literal["", "bfloat16", "float16"] = ""
    loss_scale: float = 32768.0
    loss_scale_steps: int = 2000
    outer: Any = None
    adaptive: str = ""
    on_nonfinite: Literal["warn", "raise", "skip"] = "warn"
    passes: str = ""

    def __post_init__(self) -> None:
        _check_choice("mode", self.mode, MODES)
        _check_choice("lowering", self.lowering, LOWERINGS)
        _check_choice("dispatch", self.dispatch, METHODS)
        _check_choice("batch", self.batch, ("global", "local"))
        _check_choice("communication", self.communication, COMMUNICATIONS)
        _check_choice("allreduce", self.allreduce, ALLREDUCES)
        _check_choice("amp", self.amp, ("", "bfloat16", "float16"))
        _check_choice("on_nonfinite", self.on_nonfinite, ("warn", "raise", "skip"))
        _check_choice("average", self.average, ("trainers", "rows"))
        _check_numbers(self)
        positive = (
            "min_block_size", "send_cuts", "lost_after_s", "step_timeout_s", "connect_s", "k_steps",
            "merge", "rings", "loss_scale", "loss_scale_steps",
        )  # fmt: skip
        for name in positive:
            if not getattr(self, name) > 0:
                what = f"strategy: {name} is {getattr(self, name)}, but must be positive"
                raise StrategyError(what)
        if self.devices is not None and self.devices < 1:
            raise StrategyError(f"strategy: devices is {self.devices}, but must be at least 1")
        if self.mode == "single" and self.devices not in (None, 1):
            what = f"strategy: mode 'single' with {self.devices} devices"
            raise StrategyError(what, hint="use mode='collective' for more than one device")
        if self.fuse_allreduce_bytes < 0:
            what = f"strategy: fuse_allreduce_bytes is {self.fuse_allreduce_bytes}"
            raise StrategyError(what, hint="0 turns it off; 4 << 20 makes buckets of 4 MiB")
        _check_budget(self.memory_budget)
        _check_communication(self)
        check_collective(self)

    def __repr__(self) -> str:
        chosen = {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }
        shown = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
        return f"{type(self).__name__}({shown})"

    @property
    def bound(self) -> int:
        """The staleness that holds: the one given, or else four exchanges."""
        return 4 * self.period if self.staleness is None else self.staleness

    @property
    def period(self) -> int:
        """The most of a trainer's steps from one message to servers to the next."""
        if self.communication in {"geo", "fl"}:
            return self.k_steps
        return self.merge if self.communication in {"async", "half_async"} else 1


def _refuse_to_change(_: DistributedStrategy, name: str, value: object) -> None:
    hint = f"make another: dataclasses.replace(strategy, {name}={value!r})"
    what = f"strategy: {name} is set to {value!r}, but a strategy stays as it is"
    raise FinalError(what, hint=hint)


# In the class's body `dataclass` takes none; its own says only that the field cannot be assigned.
DistributedStrategy.__setattr__ = _refuse_to_change  # type: ignore[method-assign,assignment]


def _check_numbers(strategy: DistributedStrategy) -> None:
    """Refuses what is no number, or no integer, whether the mode reads it or not."""
    for name in (*_WHOLE, *_NUMBERS):
        value, is_whole = getattr(strategy, name), name in _WHOLE
        if value is None and name in _UNLESS_GIVEN:
            continue
        if not _is_number(value, whole=is_whole):
            kind = "an integer" if is_whole else "a number"
            raise StrategyError(f"strategy: {name} is {value!r}, but must be {kind}")
    for name in ("staleness", "delay_compensation", "loss_scale"):
        if (value := getattr(strategy, name)) is not None and not 0 <= value < math.inf:
            raise StrategyError(f"strategy: {name} is {value}, but must be 0 or more")


def check_skips_no_rows(strategy: DistributedStrategy) -> None:
    """Refuses to leave out steps that look up tables: their rows change as gradients arrive.

    Raises:
        StrategyError: the strategy says `skip`.
    """
    if strategy.on_nonfinite == "skip":
        what = (
            "on_nonfinite='skip' with a step that looks up tables, whose rows change all the same"
        )
        raise StrategyError(what, hint="on_nan='skip' of a table leaves out the rows concerned")


def _is_number(value: object, *, whole: bool) -> bool:
    """Tells whether a value is one, Python's or numpy's; a truth value is none."""
    if isinstance(value, bool):
        return False
    with suppress(TypeError):
        operator.index(value)  # type: ignore[arg-type]  # which is what is asked
        return True
    return not whole and isinstance(value, float | np.floating)


def _check_budget(budget: float | None) -> None:
    if budget is None:
        return
    if not _is_number(budget, whole=False):
        what = f"strategy: memory_budget is {budget!r}"
        raise StrategyError(what, hint="an int is bytes, a float a fraction: 0.3")
    if not budget > 0 or (isinstance(budget, float | np.floating) and budget > 1):
        what = f"strategy: memory_budget is {budget!r}"
        raise StrategyError(what, hint="an int is bytes, from 1 on; a float a fraction up to 1.0")


def _check_communication(strategy: DistributedStrategy) -> None:
    """Refuses what makes no sense together; fields that a mode does not read may stand there."""
    how = strategy.communication
    if how == "sync":
        return
    if strategy.local_statistics:
        what = f"strategy: local_statistics with communication {how!r}"
        raise StrategyError(what, hint="leave it out: there, statistics are each trainer's own")
    if how not in {"fl", "local_sgd"} and strategy.bound < (least := strategy.period - 1):
        what = f"strategy: staleness is {strategy.bound}, and servers hear of a trainer only every"
        hint = f"raise staleness to at least {least}, or lower merge or k_steps"
        raise StrategyError(f"{what} {strategy.period} steps", hint=hint)


def as_strategy(strategy: "DistributedStrategy | str | None") -> DistributedStrategy:
    """Returns a strategy from a strategy, its mode's name, or nothing.

    Raises:
        StrategyError: no mode has that name, or it is no strategy.
    """
    if strategy is None:
        return DistributedStrategy()
    if isinstance(strategy, str):
        _check_choice("mode", strategy, MODES)
        return dataclasses.replace(DistributedStrategy(), mode=strategy)  # type: ignore[arg-type]
    if not isinstance(strategy, DistributedStrategy):
        is_short = isinstance(strategy, type | int | float)
        found = repr(strategy) if is_short else f"a {type(strategy).__name__}"
        what = f"strategy: {found} is not a strategy"
        hint = "pass a DistributedStrategy, or the name of a mode; state and batch are one "
        hint += "argument: jf.distribute(train_step, example=(state, batch))"
        raise StrategyError(what, hint=hint)
    return strategy


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        what = f"strategy: {name} is {value!r}"
        raise StrategyError(what, hint=f"choose one of {', '.join(map(repr, choices))}")
