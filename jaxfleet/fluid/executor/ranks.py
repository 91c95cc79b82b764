"""Runs what a collective transpiler wrote: a rank's program, on a device for each rank."""

from collections.abc import Mapping
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from jaxfleet.errors import FeedError
from jaxfleet.fluid.drawing import RUN
from jaxfleet.fluid.feeding import one_feed
from jaxfleet.fluid.plans import runnable
from jaxfleet.fluid.program import Program
from jaxfleet.ops import Array
from jaxfleet.runtime.ranks import RanksProgram
from jaxfleet.runtime.scope import Scope

Names: TypeAlias = tuple[str, ...]

_APART = 0x9E3779B9  # between ranks' numbers of a run: odd, and far from a number of runs
_WORD = 1 << 32


def rank_count(program: Program) -> int:
    """Returns how many ranks a program is for; 1 for one that is not for ranks."""
    facts = program._facts
    return int(str(facts["nranks"])) if facts.get("role") == "collective" else 1


class RankRuns:
    """Keeps programs of ranks ready, as long as they live and stay what they are."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Program, tuple[int, dict[tuple[Names, Names], RanksProgram]]]
        self._known = WeakKeyDictionary()

    def run(
        self, program: Program, fed: Mapping[str, Any], fetch: Names, scope: Scope, run: np.uint32
    ) -> list[Array]:
        """Runs a program on all ranks; returns what is fetched, rank after rank.

        Args:
            program: it.
            fed: the rows of all ranks, in the order of the ranks.
            fetch: the names that are fetched.
            scope: where the state is.
            run: what random operators draw by.

        Raises:
            StrategyError: this process has fewer devices than there are ranks.
            FeedError: what is fed, fetched or in the scope does not fit.
        """
        ready = self._found(program, tuple(fed), fetch)
        names = [v.name for v in ready.uses.data if v.name != RUN]
        missing = [name for name in names if name not in fed]
        if missing:
            raise FeedError(f"'{missing[0]}' is not fed", hint=f"feed all of {', '.join(names)}")
        drawn = _numbers(run, rank_count(program), alike=bool(program.random_seed))
        return ready.run({**fed, RUN: drawn}, scope)

    def clear(self) -> None:
        """Lets all of them go."""
        self._known.clear()

    def _found(self, program: Program, fed: Names, fetch: Names) -> RanksProgram:
        known = self._known.get(program)
        if known is None or known[0] != program.version:
            known = self._known[program] = (program.version, {})
        if (fed, fetch) not in known[1]:
            known[1][fed, fetch] = RanksProgram.of(runnable(program, fed), fetch)
        return known[1][fed, fetch]


def rows_of_all(feed: Any, ranks: int) -> Mapping[str, Any]:
    """Returns what all ranks are fed: a dict of it, or of a dict for each rank.

    Raises:
        FeedError: there are dicts for another number of ranks, or of other names.
        TypeError: it is no dict.
    """
    if not isinstance(feed, list | tuple) or len(feed) == 1:
        return one_feed(feed)
    if len(feed) != ranks or any(one.keys() != feed[0].keys() for one in feed):
        what = f"{len(feed)} feeds for {ranks} ranks"
        raise FeedError(what, hint="feed one dict, or one of the same names for each rank")
    return {name: np.concatenate([np.asarray(one[name]) for one in feed]) for name in feed[0]}


def rows_of_each(value: Array, ranks: int) -> list[Array]:
    """Returns what each rank made, of what all made."""
    rows = value.shape[0] // ranks
    return [value[rank * rows : (rank + 1) * rows] for rank in range(ranks)]


def _numbers(run: np.uint32, ranks: int, *, alike: bool) -> np.ndarray:
    """Returns what each rank draws by: with a seed all alike, as processes of one script do."""
    apart = 0 if alike else _APART
    numbers = (int(run) + apart * np.arange(ranks, dtype=np.uint64)) % _WORD
    return numbers.astype(np.uint32)
