"""Fits a step to a memory budget: plans, compiles, compares, and plans again."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from jaxfleet.analysis.memory import (
    Chain,
    ExecutableCuts,
    MemoryProfile,
    RecomputePlan,
    cost_of,
    memory_profile,
    offload_plans,
    peak_of,
    plan_for,
    smallest_budget,
    stages_of,
    uniform_plans,
)
from jaxfleet.analysis.memory.profile import size_text
from jaxfleet.errors import PassError, StrategyError
from jaxfleet.ir import Program
from jaxfleet.lower.host_transfer import host_memory_is_apart
from jaxfleet.lower.staged import Peak, count_runs
from jaxfleet.observability import Progress
from jaxfleet.passes import CutApart, Offload, OrderForMemory, Recompute
from jaxfleet.pipeline import Pass
from jaxfleet.runtime.memory_html import fit_html

Passes: TypeAlias = tuple[Pass, ...]

# Most compilations for a budget: each takes at least as long as the original step's.
_TRIES = 4  # plans, besides the smallest and even ones if none of them meets it
_CUT_TRIES = 2  # ways without recomputation, before plans and after they fail
_HOST_TRIES = 3  # plans with values on the host, besides the one that holds least
_MOVES = frozenset({"to_host", "to_device"})
_NEAR = 0.9  # of the budget: no faster plan is searched from this usage on
_LEAST_BYTES = 1 << 20  # a smaller step is not cut unless a budget requires it
_NEAR_LEAST = 1.1  # of the least by count: the target of cuts, for fewer executables
_WORTH = 0.9  # of the original peak: from here on separate executables do not pay
_COUNTED_TOO_MUCH = 1.3  # largest ratio of the count of `ExecutableCuts` to xla's peak
_MOST_PLANS = 12  # of all kinds, as in docs/memory.md
_SHARE = 100  # reciprocal share of the step's original memory below which a value does not move


@dataclass(frozen=True)
class Way:
    """A candidate version of a step, made by `passes`; `for_all` budgets it is tried."""

    passes: Passes
    note: str
    for_all: bool = False


def recompute_by(plan: RecomputePlan) -> Recompute:
    """Returns the pass that applies a plan."""
    return Recompute(cuts=plan.cuts, kept=plan.kept, saved=tuple(sorted(plan.saved)))


def moving(before: int, sizes: Mapping[str, int]) -> Offload:
    """Returns the offload pass, with a threshold relative to the step's original bytes `before`."""
    smallest = min(Offload.smallest_bytes, before // _SHARE)
    return Offload(smallest_bytes=smallest, rows=max(sizes.values(), default=1))


def ways_on_host(
    program: Program,
    sizes: Mapping[str, int],
    fetched: Sequence[str],
    budget: int,
    offload: Offload,
) -> Iterator[Way]:
    """Yields the least recomputing versions within budget by the model, and the smallest one.

    Raises:
        PassError: the step has no forward and backward part to plan.
    """
    plans = offload_plans(stages_of(program, sizes, keep=fetched))
    if not plans:
        return
    least = min(plans, key=lambda made: (made.held, made.cost))
    good = [made for made in plans if made.held <= budget and made is not least]
    for made in (*good[:_HOST_TRIES], least):
        again = "some of them computed again" if made.cost else "nothing is computed again"
        note = f"{len(made.plan.kept)} groups, {again}"
        yield Way((recompute_by(made.plan), offload), note, made is least)


@dataclass(frozen=True)
class Fit:
    """Result for a budget."""

    original: Program = field(repr=False)  # the program, before it was fitted
    budget: int  # in bytes
    before: int  # xla's peak of the original step, in bytes
    after: Peak | None  # xla's peak of the chosen one, in bytes; None for the original step
    note: str  # the reason, in words
    passes: Passes = ()  # turn the original step into the chosen one

    def _repr_html_(self) -> str:
        return fit_html(self)


@dataclass(frozen=True)
class Memory(ABC):
    """Memory use of a program on a device."""

    program: Program
    device: Any

    @property
    @abstractmethod
    def sizes(self) -> Mapping[str, int]:
        """Values of the symbolic sizes."""

    @property
    @abstractmethod
    def fetched(self) -> tuple[str, ...]: ...

    @property
    @abstractmethod
    def runs(self) -> Sequence[Any]:
        """The executables that one step runs, in order."""

    @abstractmethod
    def peak(self) -> Peak:
        """Returns xla's peak; compiles if necessary."""

    @property
    def host_is_apart(self) -> bool:
        """Whether pinned host memory is separate from the device's."""
        return host_memory_is_apart(self.device)

    @property
    def executables(self) -> tuple[int, int]:
        return count_runs(self.runs)

    def curve(self) -> MemoryProfile:
        return memory_profile(self.program, self.sizes, keep=self.fetched)


@dataclass
class Fitting:
    """Search for a version of a step that fits a budget."""

    memory: Memory  # of the original step
    of: Callable[[Program], Memory]  # memory of another program of this step
    # Whether values may be offloaded to the host: first (True), last if that has separate memory
    # (None), or never (False)
    offload: bool | None = False
    _tried: dict[Passes, Peak] = field(default_factory=dict)
    _progress: Progress = field(init=False)
    _last_ways: list[Passes] = field(default_factory=list)  # tried before any budget is rejected

    def __post_init__(self) -> None:
        self._progress = Progress(f"memory_budget of '{self.memory.program.name}'")

    def to(self, wanted: float) -> Fit:
        """Returns the version that meets the budget with the least recomputation.

        Args:
            wanted: an int of bytes, or a float fraction of the original peak.

        Raises:
            StrategyError: nothing meets it; the error names the least possible budget.
        """
        with self._progress:
            return self._fit_to(wanted)

    def _fit_to(self, wanted: float) -> Fit:
        self._progress.show("compiling it as it is")
        before = self.memory.peak().bytes
        self._progress.report(f"compiled as it is, it takes {size_text(before)}")
        is_share = isinstance(wanted, float | np.floating)
        budget = int(wanted * before) if is_share else int(wanted)
        if before <= budget:
            return Fit(self.memory.program, budget, before, None, "as it is, the step meets it")
        if any(op.type == "cut" for op in self.memory.program.root.ops):
            return self._as_cut(budget, before)
        if self.offload and (fit := self._on_host(budget, before)) is not None:
            return fit
        for passes in self._apart(budget, counted=_COUNTED_TOO_MUCH * budget):
            if self._peak(passes).bytes <= budget:
                return self._fit(budget, passes, _cut_note(passes))
        why = ""
        try:
            chain = stages_of(self.memory.program, self.memory.sizes, keep=self.memory.fetched)
            plan = self._search(chain, budget)
        except PassError as error:
            plan, why = None, f": {error}"
        if plan is not None:
            count = sum(not kept for kept in plan.kept)
            note = f"{len(plan.kept)} groups, {count} of them computed again"
            return self._fit(budget, (recompute_by(plan),), note)
        for passes in self._apart(0, counted=float("inf")):
            self._last_ways.append(passes)
            if self._peak(passes).bytes <= budget:
                return self._fit(budget, passes, _cut_note(passes))
        tries_host = self.offload is None and self.memory.host_is_apart
        if tries_host and (fit := self._on_host(budget, before)) is not None:
            return fit
        raise self._cannot(budget, before, why)

    def least(self, *, exact: bool = False) -> Fit:
        """Returns a smaller version without recomputation, or the original step.

        Besides the original it compiles only the version with the smallest counted peak, cut into
        the fewest executables that come near it.

        Args:
            exact: take the peak of the original from xla, however small it is counted.
        """
        with self._progress:
            return self._fit_least(exact=exact)

    def _fit_least(self, *, exact: bool) -> Fit:
        ways = self._ways_apart()
        counted = int(ways[0][1].held[0, -1]) if ways else 0
        if counted < _LEAST_BYTES:
            peak = self.memory.peak().bytes if exact else counted
            return Fit(self.memory.program, peak, peak, None, "it is too small to be cut apart")
        before = self.memory.peak().bytes
        as_it_is = Fit(self.memory.program, before, before, None, "no smaller way was found")
        passes, apart = min(ways, key=lambda way: way[1].least())
        least = round(_NEAR_LEAST * apart.least())
        cuts = apart.cuts(least) if least <= _COUNTED_TOO_MUCH * _WORTH * before else None
        if not cuts:
            return as_it_is
        made = (*passes, CutApart(cuts=cuts))
        if self._peak(made).bytes > _WORTH * before:
            return as_it_is
        return self._fit(before, made, _cut_note(made))

    def _as_cut(self, budget: int, before: int) -> Fit:
        """Returns the fit of a step that `strategy.passes` has cut."""
        moved = any(op.type in _MOVES for op in self.memory.program.root.ops)
        may = self.memory.host_is_apart if self.offload is None else self.offload
        way = Way((moving(before, self.memory.sizes),), "as it is cut", for_all=True)
        if may and not moved and (fit := self._try([way], budget)) is not None:
            return fit
        raise self._cannot(budget, before, ": strategy.passes has cut it already")

    def _on_host(self, budget: int, before: int) -> Fit | None:
        """Returns the first version that meets the budget by offloading values."""
        memory = self.memory
        offload = moving(before, memory.sizes)
        try:
            ways = ways_on_host(memory.program, memory.sizes, memory.fetched, budget, offload)
            return self._try(ways, budget)
        except PassError:
            return None

    def _try(self, ways: Iterable[Way], budget: int) -> Fit | None:
        for way in ways:
            if way.for_all:
                self._last_ways.append(way.passes)
            peak = self._peak(way.passes)
            if peak.bytes <= budget:
                note = f"{way.note}; {size_text(peak.host_bytes)} wait on the host"
                return self._fit(budget, way.passes, note)
        return None

    def _fit(self, budget: int, passes: Passes, note: str) -> Fit:
        return Fit(
            self.memory.program, budget, self.memory.peak().bytes, self._peak(passes), note, passes
        )

    def _apart(self, budget: int, *, counted: float) -> Iterator[Passes]:
        """Yields cuts without recomputation that may meet a budget.

        `budget` is the target of the cuts, if it is above the least; `counted` bounds a version's
        counted least.
        """
        found = dict[Passes, None]()
        for before, apart in sorted(self._ways_apart(), key=lambda way: way[1].least()):
            least = apart.least()
            if least <= counted:
                for aim in dict.fromkeys((max(least, budget), least)):
                    cuts = apart.cuts(aim)
                    if cuts:
                        found[*before, CutApart(cuts=cuts)] = None
        yield from list(found)[:_CUT_TRIES]

    def _ways_apart(self) -> list[tuple[Passes, ExecutableCuts]]:
        """Returns the step in its own and in a smaller order, cut wherever possible.

        Empty if the step is cut already.
        """
        program, sizes, keep = self.memory.program, self.memory.sizes, self.memory.fetched
        if any(op.type == "cut" for op in program.root.ops):
            return []
        ordering = OrderForMemory(rows=max(sizes.values(), default=1), keep=keep)
        ordered = ordering.run(program)
        ways: list[tuple[Passes, ExecutableCuts]] = [
            ((), ExecutableCuts.of(program, sizes, keep=keep))
        ]
        if ordered is not program:
            ways.append(((ordering,), ExecutableCuts.of(ordered, sizes, keep=keep)))
        return ways

    def _search(self, chain: Chain, budget: int) -> RecomputePlan | None:
        """Returns the cheapest plan found to meet the budget, by xla's figures.

        The model counts operators and xla merges them, so the target moves until the result is near
        the budget.
        """
        aim, low, high = float(budget), 0.0, float("inf")
        plans = dict[RecomputePlan, int]()
        for _ in range(_TRIES):
            plan = plan_for(chain, int(aim)) or smallest_budget(chain)[1]
            if plans.get(plan, 0) > budget:  # the next one that is smaller by the model too
                plan = plan_for(chain, peak_of(chain, plan) - 1) or smallest_budget(chain)[1]
            if plan in plans:
                break
            peak = plans[plan] = self._planned(plan).bytes
            if peak <= budget:
                low = aim
                if peak >= _NEAR * budget or not cost_of(chain, plan):
                    break
            else:
                high = aim
            aim = (low + high) / 2 if low and high < float("inf") else aim * budget / max(1, peak)
        for plan in (smallest_budget(chain)[1], *uniform_plans(chain)):
            if any(peak <= budget for peak in plans.values()):
                break
            self._last_ways.append((recompute_by(plan),))
            plans[plan] = self._planned(plan).bytes
        met = [plan for plan, peak in plans.items() if peak <= budget]
        return min(met, key=lambda plan: cost_of(chain, plan), default=None)

    def _planned(self, plan: RecomputePlan) -> Peak:
        return self._peak((recompute_by(plan),))

    def _peak(self, passes: Passes) -> Peak:
        if passes not in self._tried:
            number = len(self._tried) + 1
            text = f"compiling plan {number} of at most {_MOST_PLANS}"
            self._progress.report(text, share=(number - 1) / _MOST_PLANS)
            self._tried[passes] = self.of(self.program(passes)).peak()
            text = f"plan {number} takes {size_text(self._tried[passes].bytes)}"
            self._progress.report(text, share=number / _MOST_PLANS)
        return self._tried[passes]

    def program(self, passes: Passes) -> Program:
        """Returns the program that these passes make of the original one."""
        program = self.memory.program
        for pass_ in passes:
            program = pass_.run(program)
        return program

    def _cannot(self, budget: int, before: int, why: str = "") -> StrategyError:
        # Only what was tried for this budget: other tries depend on their own budgets.
        least = min([before, *(self._peak(passes).bytes for passes in self._last_ways)])
        what = f"memory_budget: the step cannot be made to take {budget:,} bytes{why}"
        hint = f"the least that it was made to take is {least:,}; as it is, it takes {before:,}"
        if budget == 1:
            hint = f"1 is one byte, and 1.0 a fraction: all that the step takes as it is; {hint}"
        return StrategyError(what, hint=hint)


def _cut_note(passes: Passes) -> str:
    order = ", in another order" if len(passes) > 1 else ""
    return f"cut into executables{order}; nothing is computed again"
