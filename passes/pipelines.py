"""Pipelines: which passes, in which order, turn a captured step into what its processes run.

A step without servers takes `collective_pipeline`. A job with servers takes `placement_pipeline`,
then `exchange_pass` for a trainer or a server, and on trainers `trainer_pipeline`.
"""

from collections.abc import Iterator, Sequence

from jaxfleet.errors import StrategyError
from jaxfleet.ir import Program
from jaxfleet.passes.collective.allreduce import (
    DealRings,
    ExchangeAllreduce,
    FuseAllreduce,
    TwoLevels,
)
from jaxfleet.passes.collective.grad_allreduce import GradAllreduce, ShardedUpdate
from jaxfleet.passes.collective.gradient_accumulation import MergeGradients
from jaxfleet.passes.collective.local_steps import Meet, TrainApart
from jaxfleet.passes.collective.scan_slices import ScanSlices, counts_out_slices
from jaxfleet.passes.collective.slice_analysis import may_slice_batch
from jaxfleet.passes.collective.slice_division import (
    InterleaveSlices,
    StrideSlices,
    goes_over_slices,
)
from jaxfleet.passes.dce import DeadCodeElimination
from jaxfleet.passes.memory.memory_optimize import Donate
from jaxfleet.passes.memory.offload import Offload
from jaxfleet.passes.peephole import TurnProducts
from jaxfleet.passes.precision.amp import HalfPrecision
from jaxfleet.passes.precision.skip_nonfinite import SkipNonfinite, SkipOverflow
from jaxfleet.passes.pserver.insert_send_recv import InsertSendRecv
from jaxfleet.passes.pserver.placement import Dispatch, SliceVar
from jaxfleet.passes.pserver.sends import MergeSends, ScheduleSends
from jaxfleet.passes.pserver.sparse_table import SparseTable
from jaxfleet.passes.pserver.trainer_updates import UpdateOnTrainers
from jaxfleet.pipeline import Pass, parse_pipeline
from jaxfleet.strategy import DistributedStrategy

# Over gloo, on two cores: a round of any size costs about 0.7 ms, and copying 64 KiB together and
# apart about 0.3. With 8 devices an exchange sends 1.7 times the bytes of a ring.
SMALL_BYTES = 1 << 16
EXCHANGING = (2, 4)


def collective_pipeline(
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
    """Returns the passes for a step on one device or several, without servers.

    The devices may be CPUs, also of several processes (`over_gloo`); `tables` is whether the step
    looks up tables. `loss` is its variable, if the strategy is adaptive, `outer` the text of an
    outer optimizer's program, and `slicing` are the passes for a step that accumulates over slices
    of the batch.
    """
    passes: list[Pass] = [DeadCodeElimination()]
    if strategy.amp:
        scale = strategy.loss_scale if strategy.amp == "float16" else 0.0
        passes.append(HalfPrecision(dtype=strategy.amp, loss_scale=scale, emulate=on_cpus))
    if strategy.amp == "float16":
        every = strategy.loss_scale_steps
        passes.append(SkipOverflow(every=every, forward=strategy.merge == 1))
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
        yield _joined_small()
    pays = over_gloo and devices in EXCHANGING
    if strategy.allreduce == "exchange" or (strategy.allreduce == "auto" and pays):
        yield ExchangeAllreduce(devices=devices)


def _joined_small() -> FuseAllreduce:
    """Returns the pass that fuses small all-reduces, and keeps large ones apart."""
    return FuseAllreduce(largest_bytes=SMALL_BYTES, across_roles=True)


def gloo_pipeline(devices: int, *, joins: bool = True) -> tuple[Pass, ...]:
    """Returns the passes for a program's all-reduces over CPUs that gloo connects.

    `joins` allows fusing small values.
    """
    joined: tuple[Pass, ...] = (_joined_small(),) if joins else ()
    return (*joined, ExchangeAllreduce(devices=devices)) if devices in EXCHANGING else joined


def dividing_passes(
    program: Program, strategy: DistributedStrategy, trainers: int
) -> tuple[Pass, ...]:
    """Returns the passes that divide a step's batch among trainers."""
    # Slices can be shared for some sizes of the batch only, and servers are the same for all.
    dividing = GradAllreduce(
        devices=trainers,
        local_statistics=strategy.local_statistics,
        sum_whole=may_have_slices(program),
    )
    return (*slicing_passes(program, trainers), dividing)


def placement_pipeline(
    strategy: DistributedStrategy, endpoints: Sequence[str], dividing: Sequence[Pass]
) -> tuple[Pass, ...]:
    """Returns the passes before the exchange, of which the last place slices on servers.

    `dividing` are `dividing_passes`; none if every trainer computes the whole batch.
    """
    skipping = [SkipNonfinite()] if strategy.on_nonfinite == "skip" else []
    updating = [UpdateOnTrainers()] if strategy.communication == "sync" else []
    slicing = SliceVar(
        servers=len(endpoints), min_block_size=strategy.min_block_size, slice=strategy.slice_var
    )
    dispatch = Dispatch(
        endpoints=tuple(endpoints), method=strategy.dispatch, max_imbalance=strategy.max_imbalance
    )
    return (DeadCodeElimination(), *skipping, *dividing, *updating, slicing, dispatch)


def exchange_pass(strategy: DistributedStrategy, trainers: int) -> InsertSendRecv:
    """Returns the pass that writes the programs, for trainer 0 until it is replaced."""
    if strategy.communication == "sync":
        return InsertSendRecv(trainers=trainers)
    return InsertSendRecv(
        trainers=trainers,
        mode=strategy.communication,
        staleness=strategy.bound,
        merge=strategy.merge,
        k_steps=strategy.k_steps,
        compensation=strategy.delay_compensation,
        by_rows=strategy.communication == "fl" and strategy.average == "rows",
    )


def trainer_pipeline(
    strategy: DistributedStrategy, *, trainer: int, tables: bool
) -> tuple[Pass, ...]:
    """Returns the passes for a trainer's program once it sends and receives.

    Trainers that update parameters themselves send everything at once.
    """
    together = strategy.communication in {"geo", "fl"}
    scheduling = () if together else (ScheduleSends(cuts=strategy.send_cuts),)
    looking_up = (SparseTable(trainer_id=trainer),) if tables else ()
    return (*scheduling, MergeSends(), *looking_up, *named_passes(strategy))


def named_passes(strategy: DistributedStrategy) -> list[Pass]:
    """Returns the passes named by a strategy, and the offload pass if it is enabled."""
    named = list(parse_pipeline(strategy.passes))
    wanted = strategy.offload and strategy.memory_budget is None  # which plans for it
    if wanted and not any(isinstance(pass_, Offload) for pass_ in named):
        cutting = [n for n, pass_ in enumerate(named, 1) if pass_.name in Offload.runs_after]
        named.insert(max(cutting, default=len(named)), Offload())
    return named


def may_have_slices(program: Program) -> bool:
    """Whether a step may go over slices of the batch, in a loop or unrolled."""
    in_loops = goes_over_slices(program) or counts_out_slices(program)
    return in_loops or may_slice_batch(program)


def slicing_passes(program: Program, sharers: int) -> tuple[Pass, ...]:
    """Returns the passes that give every sharer a part of each slice of the batch.

    There are none if the batch size is symbolic.
    """
    if not isinstance(program.attrs.get("batch"), int) or not may_have_slices(program):
        return ()
    return ScanSlices(), InterleaveSlices(devices=sharers), StrideSlices(devices=sharers)
