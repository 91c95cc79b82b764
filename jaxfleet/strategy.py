"""DistributedStrategy: how a step is distributed, and which options are compatible."""

import dataclasses
import math
import operator
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxfleet.analysis.placement.policies import MAX_IMBALANCE, METHODS
from jaxfleet.errors import FinalError, StrategyError

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
    "trainer_return_s",
    "sigterm_grace_s",
    "step_timeout_s",
    "connect_s",
    "delay_compensation",
    "loss_scale",
)
_UNLESS_GIVEN = ("devices", "staleness")  # None: chosen elsewhere


@dataclass(frozen=True, kw_only=True)
class DistributedStrategy:
    """Options for distributing a training step.

    Attributes:
        mode: `single` runs on one device; `collective` divides the batch over all devices;
            `pserver` divides it over trainers, and keeps parameters and optimizer state on servers:
            processes that `jaxfleet launch` starts.
        devices: number of devices; by default all.
        lowering: `shard_map`, or `pmap` as an alternative spelling.
        local_statistics: compute batch statistics (BatchNorm) per device, as most frameworks do; by
            default over the whole batch, which costs an all-reduce a layer.
        fuse_allreduce_bytes: fuse all-reduces up to this many bytes; 0 keeps one for each gradient,
            which is fastest with XLA:CPU on one machine's memory. Across processes small ones are
            fused all the same.
        allreduce: algorithm of all-reduces: `ring` is the compiler's own; `exchange` swaps in
            pairs, on 2, 4, 8 ... devices; `auto` exchanges on up to 4 CPU devices of several
            processes, where gloo's ring costs more (docs/collective.md), and leaves the rest to the
            compiler.
        donate: let the new state take the memory of the old; a state can then be used once.
        slice_var: servers: cut parameters into slices, one a server.
        min_block_size: servers: the fewest elements of a slice.
        dispatch: servers: `round_robin`, `hash_name` or `balanced`.
        max_imbalance: servers: bound on the ratio of the fullest server to the mean; 0: none. By
            default 4: random placement by a hash often reaches 2.
        send_cuts: trainers: number of groups of gradients, each sent as soon as it is computed.
        batch: trainers: a step is called with the whole batch, `global`, of which it takes its
            rows, or with its own rows only, `local`.
        lost_after_s: a peer without a heartbeat for this many seconds is lost.
        step_timeout_s: deadline in seconds of a living peer for a step.
        connect_s: trainers: deadline in seconds for the first answer of all servers.
        on_trainer_lost: what a job does if a trainer is lost: `fail` ends it with an error; `wait`
            lets a new process take its place, from the step that the old one was computing
            (docs/parameter-servers.md), in `fl` from the last exchange, and in the other relaxed
            modes of servers from the newest state (docs/relaxed-modes.md); `continue` lets the
            others go on: with communication `sync` at the next step, the batch cut over them,
            without `batch="local"`; with the other modes but `fl` and `local_sgd` each at a step
            of its own, with `batch="local"`; and without the pass `compress_sends`.
        trainer_return_s: `wait`: how long the others wait for a lost trainer, in seconds.
        sigterm_grace_s: `continue`: a trainer that gets SIGTERM leaves the job before its next
            step, if that begins within this many seconds; 0: SIGTERM has its usual effect.
        replay_bytes: trainers: bytes of pushes to keep, for all servers together, to replay to a
            restarted server; beyond that servers write checkpoints. They also write them before
            replay takes long, so far less is kept in steady state.
        communication: synchronization of trainers and servers (docs/relaxed-modes.md). `sync`: all
            wait for each other at every step, as one device. `async`: each trains on its own rows,
            and its gradients are applied on arrival. `half_async`: the same, by the mean of `merge`
            gradients. `geo`: trainers update, and exchange their deltas every `k_steps`.
            `dc_asgd`: `async` with gradients corrected for their delay. `fl`: parameters are
            averaged over all trainers every `k_steps`. The mode `collective` has two: `sync`, and
            `local_sgd`, where every device trains independently on its own rows, and parameters are
            averaged over all every `k_steps`.
        staleness: a step sees all updates that every trainer sent up to this many steps before it;
            a trainer that is ahead waits. By default chosen by `communication`.
        k_steps: geo, fl, local_sgd: a trainer's steps from one exchange to the next.
        merge: async, half_async: the most gradients that are merged into one message. single,
            collective: number of calls for one update, by the mean of their gradients, which are
            accumulated and reduced once.
        delay_compensation: dc_asgd: strength of the gradients' correction.
        average: fl: weight by trainers (`trainers`), or by the rows that each trained on (`rows`).
        memory_budget: bound on a step's memory besides its state, batch and results, on each device
            or trainer: bytes (an int), or a fraction (a float) of its original use
            (docs/memory.md). None: xla's own use.
        offload: move values that are read much later to pinned host memory, between a step's
            executables (docs/memory.md). True: with a `memory_budget` before any recomputation, and
            without one wherever `passes` cut the step. None: if nothing else meets a budget, on
            devices with memory of their own. False: never.
        sharded: collective: shard the optimizer's state over the devices; each updates its part of
            every parameter, and the parameters are gathered (ZeRO, stage 1).
        hierarchical: collective: reduce within groups of this many neighbouring devices, across the
            groups, and within again; 0: all at once.
        rings: collective: streams to which gradients' all-reduces are assigned; only those of one
            stream are fused.
        amp: single, collective: compute products forward and backward in half precision,
            `bfloat16` or `float16`; the state keeps its types. With float16 backward is scaled, and
            a step whose gradients overflow changes nothing.
        loss_scale: float16: initial scale, halved at each overflow.
        loss_scale_steps: float16: number of good steps after which it is doubled.
        outer: local_sgd: an optax optimizer that takes the devices' mean delta as its gradient:
            `optax.sgd(0.7, momentum=0.9, nesterov=True)`. None: parameters are averaged.
        adaptive: local_sgd: the name of the metric that is the loss, such as `loss`: the further it
            has fallen, the more often devices synchronize, at the latest after `k_steps`. "":
            always after k_steps.
        on_nonfinite: reaction to a non-finite scalar metric (the loss) or gradient: `warn` once,
            naming the step, some steps later (both travel with the step's results, so nothing waits
            for them); `raise` at that step, which waits for every step and reads its new state; or
            `skip`: warn, and let a step with a non-finite gradient change nothing, which costs a
            sum over every gradient. If devices or trainers train independently, only the affected
            one's step is skipped; with `merge`, all calls of the update.
        passes: further passes to run at the end, as text: `fuse_allreduce{flat=true}`.

    Examples:
        >>> import jaxfleet as jf
        >>> jf.DistributedStrategy(mode="pserver", communication="async", staleness=4)
        DistributedStrategy(mode='pserver', communication='async', staleness=4)
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
    on_trainer_lost: Literal["fail", "wait", "continue"] = "fail"
    trainer_return_s: float = 60.0
    sigterm_grace_s: float = 30.0
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
        _check_trainer_lost(self)
        _check_numbers(self)
        positive = (
            "min_block_size", "send_cuts", "lost_after_s", "step_timeout_s", "connect_s",
            "trainer_return_s", "k_steps", "merge", "rings", "loss_scale", "loss_scale_steps",
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
    def returns_s(self) -> float | None:
        """How long a job waits for a lost trainer; None if its loss is an error at once."""
        return self.trainer_return_s if self.on_trainer_lost == "wait" else None

    @property
    def bound(self) -> int:
        """The effective staleness: the given one, or else four exchanges."""
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


# In the class's body `dataclass` rejects it; its own error only names the field.
DistributedStrategy.__setattr__ = _refuse_to_change  # type: ignore[method-assign,assignment]


def _check_numbers(strategy: DistributedStrategy) -> None:
    """Rejects non-numbers and non-integers, even in fields that the mode ignores."""
    for name in (*_WHOLE, *_NUMBERS):
        value, is_whole = getattr(strategy, name), name in _WHOLE
        if value is None and name in _UNLESS_GIVEN:
            continue
        if not _is_number(value, whole=is_whole):
            kind = "an integer" if is_whole else "a number"
            raise StrategyError(f"strategy: {name} is {value!r}, but must be {kind}")
    for name in ("staleness", "delay_compensation", "loss_scale", "sigterm_grace_s"):
        if (value := getattr(strategy, name)) is not None and not 0 <= value < math.inf:
            raise StrategyError(f"strategy: {name} is {value}, but must be 0 or more")


def check_skips_no_rows(strategy: DistributedStrategy) -> None:
    """Rejects `skip` for steps that look up tables: their rows change as gradients arrive."""
    if strategy.on_nonfinite == "skip":
        what = (
            "on_nonfinite='skip' with a step that looks up tables, whose rows change all the same"
        )
        raise StrategyError(what, hint="on_nan='skip' of a table leaves out the rows concerned")


def _is_number(value: object, *, whole: bool) -> bool:
    """Whether a value is a number, Python's or numpy's; a bool is not."""
    if isinstance(value, bool):
        return False
    with suppress(TypeError):
        operator.index(value)  # type: ignore[arg-type]  # which is what is tested
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


def _check_trainer_lost(strategy: DistributedStrategy) -> None:
    how: str = strategy.on_trainer_lost
    _check_choice("on_trainer_lost", how, ("fail", "wait", "continue"))
    communication: str = strategy.communication
    what = f"strategy: on_trainer_lost={how!r} with communication {communication!r}"
    if how == "continue" and communication in {"fl", "local_sgd"}:
        raise StrategyError(what, hint="there, all trainers average their values")
    if how == "wait" and communication == "local_sgd":
        hint = "it has no servers from which a process could take the state"
        raise StrategyError(what, hint=hint)


def _check_communication(strategy: DistributedStrategy) -> None:
    """Rejects incompatible fields; fields that a mode ignores may be set."""
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
    """Returns a strategy from a strategy, its mode's name, or None.

    Raises:
        StrategyError: the mode does not exist, or the argument has another type.
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


def check_collective(strategy: DistributedStrategy) -> None:
    """Rejects options for a device mesh in other modes, and incompatible ones.

    Raises:
        StrategyError: names the fields.
    """
    for what, hint in (*_types(strategy), *_of_other_modes(strategy), *_not_together(strategy)):
        raise StrategyError(what, hint=hint)


def _types(strategy: DistributedStrategy) -> Iterator[tuple[str, str]]:
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


def _of_other_modes(strategy: DistributedStrategy) -> Iterator[tuple[str, str]]:
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


def _not_together(strategy: DistributedStrategy) -> Iterator[tuple[str, str]]:
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
