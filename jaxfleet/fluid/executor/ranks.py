"""Runs what a collective transpiler wrote: a rank's program, on a device for each rank.

The devices are this process's, or one of each process of a group that joined.
"""

from typing import Any, TypeAlias

import jax
import numpy as np

from jaxfleet.errors import FeedError
from jaxfleet.fleet.same_rank import check_same_rank
from jaxfleet.fluid.compiler.levels import levels_of
from jaxfleet.fluid.compiler.replicas import fed_to, of_all
from jaxfleet.fluid.drawing import numbers_apart
from jaxfleet.fluid.feeding import fed_values, one_feed
from jaxfleet.fluid.plans import Names, runnable
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.recomputing import recomputed
from jaxfleet.fluid.versions import PerVersion
from jaxfleet.group import Joined, joined
from jaxfleet.passes import Donate
from jaxfleet.runtime.dump_series import begin_series, run_passes
from jaxfleet.runtime.parts import Fetched
from jaxfleet.runtime.ranks import RanksProgram
from jaxfleet.runtime.reductions import summed_over
from jaxfleet.runtime.scope import Scope

Part: TypeAlias = dict[str, Any]


def rank_count(program: Program) -> int:
    """Returns how many ranks a program is for; 1 for one that is not for ranks."""
    facts = program._facts
    return int(str(facts["nranks"])) if facts.get("role") == "collective" else 1


def local_ranks(program: Program) -> int:
    """Returns how many of a program's ranks this process runs."""
    return 1 if joined() is not None else rank_count(program)


class RankRuns:
    """Keeps programs of ranks ready, as long as they live and stay what they are."""

    def __init__(self) -> None:
        self._known: PerVersion[dict[tuple[Names, Names], RanksProgram]]
        self._known = PerVersion(lambda _: {})

    def run(
        self, program: Program, feed: Any, fetch: Names, scope: Scope, run: np.uint32
    ) -> Fetched:
        """Runs a program on all ranks.

        Args:
            program: it.
            feed: a dict with the rows of all ranks that run here, or a list with a dict for each.
            fetch: the names that are fetched.
            scope: where the state is.
            run: what random operators draw by.

        Raises:
            StrategyError: this process has fewer devices than there are ranks, or is another rank.
            FeedError: what is fed, fetched or in the scope does not fit.
        """
        ranks = local_ranks(program)
        parts = _parts(program, feed, ranks)
        ready = self._found(program, tuple(parts[0]), fetch)
        declared = program.global_block().vars
        for name in [name for name in parts[0] if declared[name].persistable]:
            ready.put(name, [part.pop(name) for part in parts], scope)
        # With a seed all ranks draw alike, as processes do that run one script.
        numbers = [run] * ranks if program.random_seed else numbers_apart(run, ranks)
        return ready.run_parts(fed_to(ready, parts, numbers), scope)

    def clear(self) -> None:
        """Lets all of them go."""
        self._known.clear()

    def _found(self, program: Program, fed: Names, fetch: Names) -> RanksProgram:
        known = self._known.get(program)
        if (fed, fetch) not in known:
            made, group = runnable(program, fed), joined()
            devices = None if group is None else _firsts(program, group)
            ranks, own = rank_count(program), local_ranks(program)
            levels = levels_of(program, ranks, within=own)
            series = begin_series()
            made = run_passes(made, (*levels, *summed_over(devices or ())), series=series)
            ready = run_passes(recomputed(made, fetch, series), [Donate()], series=series)
            known[fed, fetch] = RanksProgram.of(ready, fetch, devices, group)
        return known[fed, fetch]


def _firsts(program: Program, group: Joined) -> list[Any]:
    """Returns the first device of each process.

    Raises:
        StrategyError: the program is not that of this process.
    """
    said = int(str(program._facts.get("rank", 0))), rank_count(program)
    hint = "transpile with this process's rank and all endpoints"
    check_same_rank("the program is that of", said, (group.rank, group.size), hint)
    return of_all(jax.local_devices()[:1])


def _parts(program: Program, feed: Any, ranks: int) -> list[Part]:
    """Returns what each rank is fed, checked.

    Raises:
        FeedError: ranks cannot share the rows, or there are not as many dicts as ranks.
        TypeError: what is fed is no dict.
    """
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
    """Returns one rank's rows; a value without axes is for all."""
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
