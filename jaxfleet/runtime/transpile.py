"""Choice and order of the passes for a captured step and a strategy."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxfleet.analysis.verifier_rules import meaning_rules
from jaxfleet.env import read_environment
from jaxfleet.errors import StrategyError
from jaxfleet.ir import Program
from jaxfleet.passes import (
    DeadCodeElimination,
    DealRings,
    Donate,
    ExchangeAllreduce,
    FuseAllreduce,
    GradAllreduce,
    HalfPrecision,
    Meet,
    MergeGradients,
    Offload,
    ShardedUpdate,
    SkipNonfinite,
    SkipOverflow,
    SparseTable,
    TrainApart,
    TurnProducts,
    TwoLevels,
)
from jaxfleet.pipeline import (
    Dump,
    Instrument,
    Pass,
    Record,
    new_dump_folder,
    parse_pipeline,
    run_pipeline,
)
from jaxfleet.runtime.strategy import DistributedStrategy

# Over gloo, on two cores: a round of any size costs about 0.7 ms, and copying 64 KiB together and
# apart about 0.3. With 8 devices an exchange sends 1.7 times the bytes of a ring.
SMALL_BYTES = 1 << 16
EXCHANGING = (2, 4)


def over_gloo(devices: Sequence[Any]) -> bool:
    """Whether devices are CPUs of several processes, which gloo connects."""
    processes = {device.process_index for device in devices}
    return len(processes) > 1 and all(device.platform == "cpu" for device in devices)


def summed_over(devices: Sequence[Any], *, joins: bool = True) -> tuple[Pass, ...]:
    """Returns the passes for a program's all-reduces over these devices; none except over gloo.

    `joins` allows fusing small values.
    """
    if not over_gloo(devices):
        return ()
    joined: tuple[Pass, ...] = (joined_small(),) if joins else ()
    count = len(devices)
    return (*joined, ExchangeAllreduce(devices=count)) if count in EXCHANGING else joined


def joined_small() -> FuseAllreduce:
    """Returns the pass that fuses small all-reduces, and keeps large ones apart."""
    return FuseAllreduce(largest_bytes=SMALL_BYTES, across_roles=True)


def pipeline_for(
    strategy: DistributedStrategy,
    *,
    devices: int,
    over_gloo: bool = False,
    on_cpus: bool = False,
    tables: bool = False,
    loss: str = "",
    outer: str = "",
    slicing: Sequence[Pass] = (),
) -> tuple[Pass, ...]:
    """Returns the passes of a strategy.

    Args:
        strategy: how the step is distributed.
        devices: number of devices.
        over_gloo: they are CPUs of several processes.
        on_cpus: they are CPUs.
        tables: the step looks up tables.
        loss: variable of the loss, if the strategy is adaptive.
        outer: the text of an outer optimizer's program.
        slicing: the passes for a step that accumulates over slices of the batch.
    """
    passes: list[Pass] = [DeadCodeElimination()]
    if strategy.amp:
        scale = strategy.loss_scale if strategy.amp == "float16" else 0.0
        passes.append(HalfPrecision(dtype=strategy.amp, loss_scale=scale, emulate=on_cpus))
    if strategy.amp == "float16":
        skipping = SkipOverflow(every=strategy.loss_scale_steps, forward=strategy.merge == 1)
        passes.append(skipping)
    elif strategy.on_nonfinite == "skip":
        passes.append(SkipNonfinite(forward=strategy.merge == 1))
    if strategy.merge > 1:
        passes.append(MergeGradients(every=strategy.merge))
    if devices > 1:
        passes += slicing
        passes.extend(_on_devices(strategy, devices, loss, outer))
    if tables:
        passes.append(SparseTable())
    passes.extend(_reductions(strategy, devices, over_gloo=over_gloo))
    passes += named_passes(strategy)
    if strategy.donate:
        passes.append(Donate())
    return tuple(passes)


def named_passes(strategy: DistributedStrategy) -> list[Pass]:
    """Returns the passes named by a strategy, and the offload pass if it is enabled."""
    named = list(parse_pipeline(strategy.passes))
    wanted = strategy.offload and strategy.memory_budget is None  # which plans for it
    if wanted and not any(isinstance(pass_, Offload) for pass_ in named):
        cutting = [n for n, pass_ in enumerate(named, 1) if pass_.name in Offload.runs_after]
        named.insert(max(cutting, default=len(named)), Offload())
    return named


def _on_devices(
    strategy: DistributedStrategy, devices: int, loss: str, outer: str
) -> tuple[Pass, ...]:
    if strategy.communication == "local_sgd":
        meet = Meet(every=strategy.k_steps, loss=loss, outer=outer)
        return TurnProducts(), TrainApart(devices=devices), meet
    kind = ShardedUpdate if strategy.sharded else GradAllreduce
    return TurnProducts(), kind(devices=devices, local_statistics=strategy.local_statistics)


def _reductions(strategy: DistributedStrategy, devices: int, *, over_gloo: bool) -> Iterator[Pass]:
    """Yields the passes that fuse all-reduces, and select their algorithm."""
    if within := strategy.hierarchical:
        if not within < devices or devices % within:
            what = f"strategy: hierarchical is {within}, and there are {devices} devices"
            raise StrategyError(what, hint="groups are of equal size, and there are at least two")
        yield TwoLevels(within=within)
    if devices == 1:
        return
    if strategy.rings > 1:
        yield DealRings(rings=strategy.rings)
    if strategy.fuse_allreduce_bytes:
        yield FuseAllreduce(bucket_size_bytes=strategy.fuse_allreduce_bytes)
    elif over_gloo:
        yield joined_small()
    pays = over_gloo and devices in EXCHANGING
    if strategy.allreduce == "exchange" or (strategy.allreduce == "auto" and pays):
        yield ExchangeAllreduce(devices=devices)


def transpile(
    program: Program,
    passes: Sequence[Pass],
    *,
    dump_dir: Path | None,
    series: Instrument | None = None,
) -> tuple[Program, Record]:
    """Runs the passes from `pipeline_for`; returns the result with the record of every pass.

    Dumps go to `dump_dir`, by default the environment's, unless `series` takes the stages.
    """
    record = Record()
    instruments: list[Instrument] = [record]
    environment = read_environment()
    folder = dump_dir
    if series is not None:
        instruments.append(series)
    elif folder is None and environment.dump_dir is not None:
        folder = new_dump_folder(environment.dump_dir, program.name)
    if folder is not None:
        instruments.append(Dump(folder, source=environment.dump_source))
    result = run_pipeline(program, passes, instruments=instruments, rules=meaning_rules)
    return result, record
