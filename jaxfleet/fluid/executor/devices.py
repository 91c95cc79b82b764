"""Execution on one device, on several of this process, or on one in each process of a group.

A startup program that names the ranks of a job joins their group.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np

from jaxfleet.cluster import ProcessGroup, has_started, initialize, joined
from jaxfleet.cluster.bootstrap import detected_rank
from jaxfleet.cluster.ranks import check_same_rank
from jaxfleet.env import Rank, read_rank, says_how_many_cpu_devices
from jaxfleet.errors import FeedError, StrategyError
from jaxfleet.fluid.compiler.compiled_program import CompiledProgram
from jaxfleet.fluid.compiler.replicas import Replicas, fed_to, hierarchical_allreduce, of_all
from jaxfleet.fluid.distribute_lookup_table import without_rows
from jaxfleet.fluid.executor.fetching import FetchedArray
from jaxfleet.fluid.framework.program import KeyedCache, Program
from jaxfleet.fluid.lowering.feeding import Feed, fed_values, one_feed, warn_empty, warn_unknown
from jaxfleet.fluid.lowering.lod_values import fetched_sequences
from jaxfleet.fluid.lowering.memory import MemoryBudget, refused_budget, with_recomputation
from jaxfleet.fluid.lowering.program_cache import CachedProgram, Names, ProgramCache, runnable
from jaxfleet.fluid.lowering.rewrites import RUN, device_run_numbers
from jaxfleet.fluid.places import device_to_choose
from jaxfleet.fluid.pserver import refuse_several_devices
from jaxfleet.passes import Donate
from jaxfleet.runtime.compiled_program import missing_state, not_fed
from jaxfleet.runtime.devices import emulated_count
from jaxfleet.runtime.program_timing import FirstRunTimer
from jaxfleet.runtime.rank_executor import Fetched, RanksProgram
from jaxfleet.runtime.scope import Scope
from jaxfleet.runtime.transpile import begin_series, run_passes, summed_over

_BY_TRAINERS, _BY_RINGS = "gen_nccl_id", "c_gen_nccl_id"  # operators that name all processes
_SAYS = frozenset({_BY_TRAINERS, _BY_RINGS})
_CONNECT_S = 120.0  # as `initialize`: the longest wait for the processes of a cluster


def names_ranks(program: Program) -> bool:
    """Whether a program names the processes that train together."""
    return any(op.type in _SAYS for op in program.global_block().ops)


def join_ranks(program: Program) -> None:
    """Joins the processes that a program names, unless they have joined already.

    The ranks of a collective transpiler may also be devices of this process. They are if jax has
    started, or is configured for several devices, and neither the environment nor a cluster names a
    group.

    Raises:
        StrategyError: the environment names other processes, or another rank.
        ConnectError: a process did not join in time.
    """
    if joined() is not None or (named := _named(program)) is None or len(named.endpoints) == 1:
        return
    said, told = _place(named), read_rank()
    if told is not None:
        hint = "transpile with PADDLE_TRAINER_ID and all endpoints"
        check_same_rank("the program is that of", said, _place(told), hint)
        initialize(told)
    elif (found := _detected()) is not None and _place(found) == said:
        initialize(found, connect_s=_CONNECT_S)
    elif not _runs_here(program):
        initialize(named)


def _detected() -> Rank | None:
    """Returns the rank assigned by a cluster; not needed if the program names all ranks."""
    with suppress(StrategyError):
        return detected_rank(_CONNECT_S)
    return None


def _place(rank: Rank) -> tuple[int, int]:
    return rank.rank, len(rank.endpoints)


def _named(program: Program) -> Rank | None:
    """Returns the rank that a program assigns to this process; None if it assigns none."""
    for op in program.global_block().ops:
        if op.type == _BY_TRAINERS:
            return Rank(op.attr("trainer_id"), tuple(op.attr("trainers")), "fluid")
        if op.type == _BY_RINGS:
            rank, others = op.attr("rank"), list(op.attr("other_endpoints"))
            others.insert(rank, op.attr("endpoint"))
            return Rank(rank, tuple(others), "fluid")
    return None


def _runs_here(program: Program) -> bool:
    """Whether all ranks of a program run on devices of this process."""
    if has_started():
        return True
    is_of_ranks = program._facts.get("role") == "collective"
    return is_of_ranks and (says_how_many_cpu_devices() or emulated_count() > 1)


Part: TypeAlias = dict[str, Any]


def rank_count(program: Program) -> int:
    """Returns the number of ranks of a program; 1 if it is not written for ranks."""
    facts = program._facts
    return int(str(facts["nranks"])) if facts.get("role") == "collective" else 1


def local_ranks(program: Program) -> int:
    """Returns the number of a program's ranks that this process runs."""
    return 1 if joined() is not None else rank_count(program)


class RankRunner:
    """Caches prepared programs for ranks until they change or are garbage-collected."""

    def __init__(self) -> None:
        self._known = KeyedCache[tuple[Names, Names], RanksProgram]()

    def run(
        self, program: Program, feed: Any, fetch: Names, scope: Scope, run: np.uint32
    ) -> Fetched:
        """Runs a program on all ranks; `run` is the run number, a key of random operators.

        The feed is a dict with the rows of all local ranks, or a list with a dict for each.

        Raises:
            StrategyError: this process has fewer devices than there are ranks, or is another rank.
            FeedError: a value in the feed, fetch list or scope does not match the program.
        """
        ranks = local_ranks(program)
        parts = _parts(program, feed, ranks)
        fed = tuple(parts[0])
        ready = self._known.find(program, (fed, fetch), partial(self._made, program, fed, fetch))
        declared = program.global_block().vars
        for name in [name for name in parts[0] if declared[name].persistable]:
            ready.put(name, [part.pop(name) for part in parts], scope)
        # With a seed all ranks draw alike, as separate processes running one script do.
        numbers = [run] * ranks if program.random_seed else device_run_numbers(run, ranks)
        return ready.run_parts(fed_to(ready, parts, numbers), scope)

    def clear(self) -> None:
        self._known.clear()

    def _made(self, program: Program, fed: Names, fetch: Names) -> RanksProgram:
        made, group = runnable(program, fed), joined()
        devices = None if group is None else _firsts(program, group)
        ranks, own = rank_count(program), local_ranks(program)
        levels = hierarchical_allreduce(program, ranks, within=own)
        series = begin_series()
        made = run_passes(made, (*levels, *summed_over(devices or ())), series=series)
        ready = run_passes(with_recomputation(made, fetch, series), [Donate()], series=series)
        return RanksProgram.of(ready, fetch, devices, group, FirstRunTimer.of(series))


def _firsts(program: Program, group: ProcessGroup) -> list[Any]:
    """Returns the first device of each process; StrategyError if the program is another rank's."""
    said = int(str(program._facts.get("rank", 0))), rank_count(program)
    hint = "transpile with this process's rank and all endpoints"
    check_same_rank("the program is that of", said, (group.rank, group.size), hint)
    return of_all(jax.local_devices()[:1])


def _parts(program: Program, feed: Any, ranks: int) -> list[Part]:
    """Returns the checked feed of each rank."""
    if not isinstance(feed, list | tuple) or len(feed) == 1:
        fed = fed_values(program, one_feed(feed), devices=ranks)
        state = {name for name, v in program.global_block().vars.items() if v.persistable}
        return [
            {n: x if n in state else _share(n, x, rank, ranks) for n, x in fed.items()}
            for rank in range(ranks)
        ]
    parts = [fed_values(program, one_feed(one)) for one in feed]
    if len(parts) != ranks or any(part.keys() != parts[0].keys() for part in parts):
        what = f"{len(feed)} feeds for {ranks} ranks"
        raise FeedError(what, hint="feed one dict, or one of the same names for each rank")
    return [{name: part[name] for name in parts[0]} for part in parts]


def _share(name: str, value: Any, rank: int, ranks: int) -> Any:
    """Returns one rank's rows; a value without axes goes to all ranks."""
    if not np.ndim(value):
        return value
    if not len(value):
        raise FeedError(f"'{name}' is fed no rows", hint="leave such a batch out, on all ranks")
    rows, rest = divmod(len(value), ranks)
    if rest or not rows:
        what = f"'{name}' is fed {len(value)} rows, which {ranks} ranks cannot share"
        hint = f"feed a multiple of {ranks}, or a list with a dict for each rank"
        raise FeedError(what, hint=hint)
    return value[rank * rows : (rank + 1) * rows]


def several_devices(
    program: Program | CompiledProgram, runs: Program, scope: Scope, place: Any, ranks: RankRunner
) -> Replicas | RankRunner | None:
    """Returns the runner of a program on several devices; None if it runs on one.

    `program` is the argument of `Executor.run`, and `runs` the program in it. Raises StrategyError
    for a memory budget, which only a program on one device supports.
    """
    if isinstance(program, CompiledProgram):
        program._compile(scope, place)
        replicas = program._replicas
        if replicas is not None and not replicas.is_one:
            refuse_several_devices(runs)
            return replicas
        if replicas is not None:
            replicas.count()
        if program._memory_budget is not None and rank_count(runs) > 1:
            raise refused_budget("a rank's program")
    return ranks if rank_count(runs) > 1 else None


def device_count(
    program: Program | CompiledProgram, runs: Program, scope: Scope, place: Any
) -> int:
    """Returns the number of local devices on which a program runs, each of which takes a batch."""
    if isinstance(program, CompiledProgram):
        program._compile(scope, place)
        if program._replicas is not None:
            return len(program._replicas.places)
    return local_ranks(runs)


class SingleDeviceRunner:
    """Runs programs on one place, and caches them prepared."""

    def __init__(self, place: Any) -> None:
        self._place = place
        self._plans = ProgramCache(self._on)
        self._device: Any = None
        self._knows_device = False

    def run(
        self,
        program: Program,
        feed: Feed,
        fetch: Names,
        scope: Scope,
        draw: Callable[[Program], np.uint32],
        *,
        return_numpy: bool,
        budget: MemoryBudget | None = None,
    ) -> list[Any]:
        """Runs a program once; returns the fetched values.

        This code runs at every step, with CPU caches that the previous step has evicted.

        With `return_numpy` the results are numpy arrays owned by the caller; otherwise JAX's
        arrays, and LoDTensors for sequences. `draw` returns the run number, a key of random
        operators, and `budget` limits the memory of the run.

        Raises:
            FeedError: a value in the feed, fetch list or scope does not match the program.
            StrategyError: the program cannot be made to fit its budget.
        """
        plan = self._plans.find(program, tuple(feed), fetch, budget)
        if plan.puts:
            _put(plan, feed, scope)
        if plan.has_sequences:
            feed = fed_values(program, {n: x for n, x in feed.items() if n not in plan.unknown})
        data = _data(plan, feed)
        for name in plan.unknown:
            warn_unknown(name)
        if not all([value.size for value in data.values()]):  # noqa: C419  # faster than a generator
            warn_empty(data)
        if plan.draws:
            data[RUN] = draw(program)
        if not (return_numpy and fetch):
            # JAX reads numpy's memory during the run, and the caller would not wait for its end.
            data = {n: v.copy() if isinstance(v, np.ndarray) else v for n, v in data.items()}
        given, kept = _state(program, plan, scope)
        device = self._on()
        if device is None:
            fetched, written = plan.prepared.function(given, kept, data)
        else:
            with jax.default_device(device):
                fetched, written = plan.prepared.function(given, kept, data)
        scope.keep(written)
        if plan.has_sequences:
            asked = len(fetch)
            feed = {**feed, **dict(zip(plan.lengths, fetched[asked:], strict=True))}
            fetched = fetched_sequences(
                program, fetch, fetched[:asked], feed, return_numpy=return_numpy
            )
        if not return_numpy:
            return list(fetched)
        return [np.array(value).view(FetchedArray) for value in fetched]

    def _on(self) -> Any:
        """Returns the device to pass to JAX; None if it is JAX's default."""
        if not self._knows_device:
            self._device, self._knows_device = device_to_choose(self._place), True
        return self._device

    def clear(self) -> None:
        self._plans.clear()


def _put(plan: CachedProgram, feed: Feed, scope: Scope) -> None:
    """Moves fed persistable variables into the scope, from which a run reads them."""
    for name, rule in plan.puts:
        scope.keep({name: jax.numpy.array(rule.take(feed[name]), copy=True)})


def _data(plan: CachedProgram, feed: Feed) -> dict[str, Any]:
    try:
        if plan.has_sequences:
            return {v.name: feed[v.name] for v in plan.prepared.data if v.name != RUN}
        return {name: rule.take(feed[name]) for name, rule in plan.data}
    except KeyError as error:
        names = [name for name, _ in plan.data]
        missing = str(error.args[0])
        raise not_fed(plan.prepared.program, missing, names, plan.unknown) from None


def _state(
    program: Program, plan: CachedProgram, scope: Scope
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the state whose memory is donated to the run, and the state that it only reads."""
    try:
        given = {name: scope.give(name) for name in plan.given}
        return given, {name: scope.peek(name) for name in plan.state}
    except KeyError as error:
        name = str(error.args[0])
        found = without_rows(program, name) or missing_state(plan.prepared.program, name)
        raise found from None
