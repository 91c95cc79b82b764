"""From a captured step and a strategy to the program that runs: which passes, in which order."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxfleet.analysis.rules import meaning_rules
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
    InterleaveSlices,
    Meet,
    MergeGradients,
    Offload,
    ScanSlices,
    ShardedUpdate,
    SkipNonfinite,
    SkipOverflow,
    SparseTable,
    StrideSlices,
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
from jaxfleet.runtime.reductions import EXCHANGING, joined_small
from jaxfleet.runtime.strategy import DistributedStrategy


def pipeline_for(
    strategy: DistributedStrategy,
    *,
    devices: int,
    over_gloo: bool = False,
    on_cpus: bool = False,
    tables: bool = False,
    loss: str = "",
    outer: str = "",
    slices: bool = False,
) -> tuple[Pass, ...]:
    """Returns the passes that a strategy asks for.

    Args:
        strategy: it.
        devices: how many there are.
        over_gloo: they are CPUs of several processes.
        on_cpus: they are CPUs.
        tables: the step looks rows up.
        loss: the variable that is the loss, where the strategy is adaptive.
        outer: the text of what an outer optimizer does.
        slices: a loop goes over slices of the batch, whose size is a number.
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
    if devices > 1 and slices:
        passes += ScanSlices(), InterleaveSlices(devices=devices), StrideSlices(devices=devices)
    if devices > 1:
        passes.extend(_on_devices(strategy, devices, loss, outer))
    if tables:
        passes.append(SparseTable())
    passes.extend(_reductions(strategy, devices, over_gloo=over_gloo))
    passes += named_passes(strategy)
    if strategy.donate:
        passes.append(Donate())
    return tuple(passes)


def named_passes(strategy: DistributedStrategy) -> list[Pass]:
    """Returns the passes that a strategy names, and the one that moves values where it says so."""
    named = list(parse_pipeline(strategy.passes))
    wanted = strategy.offload and strategy.memory_budget is None  # which plans for it
    if wanted and not any(isinstance(pass_, Offload) for pass_ in named):
        cutting = [n for n, pass_ in enumerate(named, 1) if pass_.name in Offload.runs_after]
        named.insert(max(cutting, default=len(named)), Offload())
    return named


def _on_devices(
    strategy: DistributedStrategy, devices: int, loss: str, outer: str
) -> tuple[Pass, ...]:
    """Returns the passes that make the program of each device."""
    if strategy.communication == "local_sgd":
        meet = Meet(every=strategy.k_steps, loss=loss, outer=outer)
        return TurnProducts(), TrainApart(devices=devices), meet
    kind = ShardedUpdate if strategy.sharded else GradAllreduce
    return TurnProducts(), kind(devices=devices, local_statistics=strategy.local_statistics)


def _reductions(strategy: DistributedStrategy, devices: int, *, over_gloo: bool) -> Iterator[Pass]:
    """Yields the passes that say which all-reduces go together, and how each is done."""
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
    """Runs the passes, and returns the result with what every pass did.

    Args:
        program: the captured step.
        passes: from `pipeline_for`.
        dump_dir: where to write dumps; the environment's directory, unless given.
        series: what takes the stages instead of such a dump.
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
