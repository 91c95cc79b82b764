"""Data-parallel execution of a program on several devices, each on its own rows."""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxfleet.cluster import ProcessGroup, joined
from jaxfleet.cluster.global_arrays import of_rank_0
from jaxfleet.cluster.ranks import check_same_rank
from jaxfleet.errors import AssertedError, FeedError, StrategyError, UnsupportedError
from jaxfleet.fluid.argument_checks import check_type, warn_no_effect
from jaxfleet.fluid.compiler.strategies import (
    BuildStrategy,
    ExecutionStrategy,
    GradientScaleStrategy,
)
from jaxfleet.fluid.framework.program import KeyedCache, Program
from jaxfleet.fluid.lowering.feeding import fed_values, share_sequences, split_feed, too_few
from jaxfleet.fluid.lowering.lod_values import check_fetched
from jaxfleet.fluid.lowering.memory import refused_budget, with_recomputation
from jaxfleet.fluid.lowering.program_cache import Names, runnable, warn_not_joined
from jaxfleet.fluid.lowering.rewrites import RUN, device_run_numbers
from jaxfleet.fluid.places import Place, devices_of
from jaxfleet.ir import Program as IrProgram
from jaxfleet.passes import DataParallel, Donate, MultiBatchMerge, TwoLevels
from jaxfleet.pipeline import Pass
from jaxfleet.runtime.compiled_program import not_fed
from jaxfleet.runtime.program_timing import FirstRunTimer
from jaxfleet.runtime.rank_executor import Fed, Fetched, RanksProgram
from jaxfleet.runtime.scope import Scope
from jaxfleet.runtime.transpile import DumpSeries, begin_series, run_passes, summed_over


def hierarchical_allreduce(
    program: Program, devices: int, *, within: int, build: BuildStrategy | None = None
) -> tuple[Pass, ...]:
    """Returns the pass for two-level all-reduces; no pass if there is only one level.

    The requested group size counts trainers, as in fluid, or devices if there is one trainer.

    `program` and `build` may each request levels. `devices` counts those of all processes, and
    `within` those of this one, which form a group by default.
    """
    asks = build is not None and build.use_hierarchical_allreduce
    if not (asks or program._use_hierarchical_allreduce):
        return ()
    inner = build.hierarchical_allreduce_inter_nranks if build is not None else 0
    inner = inner or program._hierarchical_allreduce_inter_nranks
    size = within if inner <= 1 else inner * (within if within < devices else 1)
    if 1 < size < devices and devices % size == 0:
        return (TwoLevels(within=size, devices=devices),)
    reason = f"{devices} devices do not go in several groups of {size}"
    warn_no_effect("use_hierarchical_allreduce", reason)
    return ()


_SCALES = {
    GradientScaleStrategy.CoeffNumDevice: "coeff_num_device",
    GradientScaleStrategy.One: "one",
    GradientScaleStrategy.Customized: "customized",
}
_Key = tuple[Names, Names, int]


class Replicas:
    """A program on several devices.

    Attributes:
        build: how it is rewritten.
        execution: how it is run.
        places: its devices.
        has_local_scopes: it has run since the last drop of local scopes. XLA frees temporaries at
            the end of a run, so nothing else is left of fluid's local scopes.

    Raises:
        StrategyError: the strategy is not compatible with the program, or is not available.
    """

    def __init__(
        self,
        program: Program,
        build: BuildStrategy,
        execution: ExecutionStrategy,
        places: Sequence[Place],
    ) -> None:
        self.build, self.execution, self.places = build, execution, places
        self.has_local_scopes = False
        self._program = program
        self._known = KeyedCache[_Key, RanksProgram]()
        self._runs, self._has_begun = 0, False
        self._check()
        if build.debug_graphviz_path:
            made = self._rewritten(program, (), len(places))
            Path(build.debug_graphviz_path).write_text(str(made), encoding="utf-8")

    @property
    def is_one(self) -> bool:
        """Whether it runs as without data parallelism."""
        scale = self.build.gradient_scale_strategy
        alone = self.build.num_trainers == 1 and self.build.num_repeats == 1
        return alone and len(self.places) == 1 and scale != GradientScaleStrategy.Customized

    def run(
        self, program: Program, feed: Any, fetch: Names, scope: Scope, run: np.uint32
    ) -> Fetched:
        """Runs a program, or its pruned copy, once on all devices.

        The feed is a dict to divide, or a list with one for each device. `run` is the run
        number, a key of random operators.

        Raises:
            FeedError: a value in the feed, fetch list or scope does not match the program.
        """
        group = self._group()
        check_fetched(program, fetch)
        parts = self._parts(program, share_sequences(program, feed, len(self.places)))
        key = (tuple(parts[0]), fetch, len(parts))
        ready = self._known.find(program, key, partial(self._made, program, *key, group))
        declared = program.global_block().vars
        for name in [n for n in parts[0] if n in declared and declared[n].persistable]:
            ready.put(name, [part.pop(name) for part in parts], scope)
        if group is not None and not self._has_begun:
            self._has_begun = True
            broadcast_state(ready, scope, group)
        first, ranks = self.build.trainer_id * len(parts), self.build.num_trainers * len(parts)
        numbers = device_run_numbers(run, ranks)[first : first + len(parts)]
        made = ready.run_parts(fed_to(ready, parts, numbers), scope)
        self.count()
        return made

    def count(self) -> None:
        """Counts a run and drops local scopes when due."""
        self._runs += 1
        self.has_local_scopes = self._runs % self.execution.num_iteration_per_drop_scope != 0

    def _group(self) -> ProcessGroup | None:
        """Returns the group of trainers; None if there is only one.

        Raises StrategyError if the processes that joined are not the trainers.
        """
        build, group = self.build, joined()
        if build.num_trainers == 1:
            return None
        if group is None:
            what = f"{build.num_trainers} trainers sum gradients, and this process is by itself"
            hint = "transpile in nccl2 mode and run the startup program, or call jf.initialize()"
            raise StrategyError(what, hint=f"{hint}, before jax starts")
        said, here = (build.trainer_id, build.num_trainers), (group.rank, group.size)
        hint = "set trainer_id and num_trainers of the BuildStrategy to this process's"
        check_same_rank("the program is compiled for", said, here, hint)
        return group

    @cached_property
    def devices(self) -> tuple[Any, ...]:
        """The devices, available from the first run on."""
        return devices_of(self.places)

    def _check(self) -> None:
        build, trainers = self.build, self.build.num_trainers
        endpoints = build.trainers_endpoints
        if endpoints and len(endpoints) != trainers:
            what = f"{trainers} trainers have {len(endpoints)} endpoints"
            raise AssertedError(
                what, hint="name each trainer's in build_strategy.trainers_endpoints"
            )
        if build.trainer_id >= trainers:
            raise StrategyError(f"trainer_id {build.trainer_id} of {trainers} trainers")
        if build.memory_budget is not None and not self.is_one:
            raise refused_budget("a program on several devices, or with other trainers,")
        if build.async_mode and not self.is_one:
            what = "async_mode: devices that do not add their gradients need a communicator"
            raise UnsupportedError(what, hint="use parameter servers: DistributeTranspiler")
        if not self.is_one and self._program._facts.get("role") == "collective":
            what = f"a rank's program is compiled for {len(self.places)} devices"
            hint = "run it as it is: each rank is a device, and its operators sum the gradients"
            raise StrategyError(what, hint=hint)
        inner = (op for block in self._program.blocks[1:] for op in block.ops)
        updates = any(op._is_optimize_op() and op.input("Grad") for op in inner)
        if updates and len(self.places) > 1:
            what = "an update in a sub-block may run on some devices and not on others"
            raise UnsupportedError(what, hint="train it on one place, or update in block 0")

    def _parts(self, program: Program, feed: Any) -> list[dict[str, Any]]:
        """Returns the checked feed of each device."""
        declared, count = program.global_block().vars, len(self.places)
        if not isinstance(feed, list | tuple):
            check_type(feed or {}, "a feed", Mapping, "feed={'x': array}, or a list of such")
            fed = fed_values(program, feed or {}, devices=count)
            return split_feed(fed, declared, count, trains=trains(program))
        for one in feed:
            check_type(one, "a member of the feed", Mapping, "a dict for each device")
        parts = [fed_values(program, one) for one in feed]
        if len(parts) > count or (len(parts) < count and (trains(program) or not parts)):
            what = f"the feed list has {len(feed)} dicts for {count} devices"
            hint = f"feed a dict for each device, or set CPU_NUM={len(feed)}; see device_count"
            raise FeedError(what, hint=hint)
        if any(part.keys() != parts[0].keys() for part in parts):
            raise FeedError("devices are fed different variables", hint="feed all the same names")
        _check_rows(parts)
        return [{name: part[name] for name in parts[0]} for part in parts]

    def _made(
        self, program: Program, fed: Names, fetch: Names, count: int, group: ProcessGroup | None
    ) -> RanksProgram:
        if group is None:
            warn_not_joined(program)
        series = begin_series()
        made = self._rewritten(program, fed, count, series)
        devices = self.devices[:count] if group is None else of_all(self.devices[:count])
        levels = hierarchical_allreduce(program, len(devices), within=count, build=self.build)
        joined = summed_over(devices, joins=self.build.fuse_all_reduce_ops is not False)
        made = run_passes(made, (*levels, *joined), series=series)
        ready = run_passes(with_recomputation(made, fetch, series), [Donate()], series=series)
        return RanksProgram.of(ready, fetch, devices, group, FirstRunTimer.of(series))

    def _rewritten(
        self, program: Program, fed: Names, count: int, series: DumpSeries | None = None
    ) -> IrProgram:
        build = self.build
        rewrite = DataParallel(
            devices=count,
            trainers=build.num_trainers,
            scale=_SCALES[build.gradient_scale_strategy],
            rings=max(build.nccl_comm_num, program._nccl_comm_num),
            sync_batch_norm=build.sync_batch_norm,
        )
        passes = [MultiBatchMerge(build.num_repeats)] if build.num_repeats > 1 else []
        return run_passes(runnable(program, fed), [*passes, rewrite], series=series)


def fed_to(
    ready: RanksProgram, parts: Sequence[Mapping[str, Any]], numbers: Sequence[np.uint32]
) -> Fed:
    """Selects the inputs that the program reads from the feed of each device.

    `numbers` are the devices' run numbers, from which random operators draw.
    """
    names = [v.name for v in ready.uses.data]
    given = [{**part, RUN: number} for part, number in zip(parts, numbers, strict=True)]
    missing = [name for name in names if name not in given[0]]
    if missing:
        raise not_fed(ready.program, missing[0], [name for name in names if name != RUN])
    return Fed.of([{name: part[name] for name in names} for part in given])


def of_all(own: Sequence[Any]) -> list[Any]:
    """Returns the devices of all processes at the positions of some of this process's."""
    places = [jax.local_devices(backend=own[0].platform).index(device) for device in own]
    by_process: dict[int, list[Any]] = {}
    for device in jax.devices(own[0].platform):
        by_process.setdefault(device.process_index, []).append(device)
    return [by_process[number][place] for number in sorted(by_process) for place in places]


def broadcast_state(ready: RanksProgram, scope: Scope, group: ProcessGroup) -> None:
    """Copies the state of the first process to all others."""
    names = [v.name for v in ready.uses.state if v.name in scope]
    values = of_rank_0(group, [scope.peek(name) for name in names], timeout_s=ready.timeout_s)
    scope.keep({name: jax.numpy.asarray(value) for name, value in zip(names, values, strict=True)})


def trains(program: Program) -> bool:
    """Whether a program computes gradients."""
    return any(op._is_backward_op() for block in program.blocks for op in block.ops)


def _check_rows(parts: Sequence[Mapping[str, Any]]) -> None:
    for part in parts:
        for name, value in part.items():
            if np.ndim(value) and not len(value):
                raise too_few(name, 0, len(parts))
