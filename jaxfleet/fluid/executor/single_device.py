"""Execution of a program on one device, and of id operators on the host.

In fluid `split_ids` and `merge_ids` distribute ids over the servers of a distributed table by
remainder. Here `jaxfleet.tables` distributes them; the operators run for scripts that contain
them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfleet.errors import FeedError
from jaxfleet.fluid.distribute_lookup_table import without_rows
from jaxfleet.fluid.executor.fetching import FetchedArray
from jaxfleet.fluid.framework.operator import Operator
from jaxfleet.fluid.framework.program import Program
from jaxfleet.fluid.lowering.feeding import Feed, fed_values, warn_empty, warn_unknown
from jaxfleet.fluid.lowering.lod_values import fetched_sequences
from jaxfleet.fluid.lowering.memory import MemoryBudget
from jaxfleet.fluid.lowering.program_cache import CachedProgram, Names, ProgramCache
from jaxfleet.fluid.lowering.rewrites import RUN
from jaxfleet.fluid.places import device_to_choose
from jaxfleet.fluid.scope import Scope as FluidScope
from jaxfleet.runtime.compiled_program import missing_state, not_fed
from jaxfleet.runtime.scope import Scope

_OPS = frozenset({"split_ids", "merge_ids"})


def has_only_id_ops(program: Program) -> bool:
    """Whether a program contains only operators that split ids and merge rows."""
    ops = program.global_block().ops
    return bool(ops) and all(op.type in _OPS for op in ops)


def run_ids(
    program: Program, fed: Mapping[str, np.ndarray], fetch: Sequence[str], scope: FluidScope
) -> list[np.ndarray]:
    """Runs a program of id operators, leaving all results in the scope; returns the fetches."""
    values = dict(fed)
    for op in program.global_block().ops:
        if op.type == "split_ids" and op.input("Ids")[0] in scope.selected_rows:
            _split_rows(op, scope)
            continue
        read = [_value(name, values, scope) for name in op.input("Ids")]
        if op.type == "split_ids":
            made = split_ids(read, len(op.output("Out")))
        else:
            rows, x = ([_value(n, values, scope) for n in op.input(s)] for s in ("Rows", "X"))
            made = merge_ids(read, rows, x)
        values.update(zip(op.output("Out"), made, strict=True))
    scope.keep({name: jnp.asarray(array) for name, array in values.items() if name not in fed})
    return [_value(name, values, scope) for name in fetch]


def split_ids(ids: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
    """Returns the sorted unique ids by their remainders: `[n, 1]` for each."""
    found = np.unique(np.concatenate([array.reshape(-1) for array in ids]))
    return [found[found % count == remainder][:, None] for remainder in range(count)]


def merge_ids(
    ids: Sequence[np.ndarray], rows: Sequence[np.ndarray], values: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Returns the values for each array of ids: `[n, ...]`; FeedError if an id has no row.

    `ids` may repeat. Each array in `rows` has the ids of the rows of one array in `values`.
    """
    known = np.concatenate([array.reshape(-1) for array in rows])
    whole, order = np.concatenate(list(values)), np.argsort(known, kind="stable")
    made = []
    for wanted in (array.reshape(-1) for array in ids):
        places = np.minimum(np.searchsorted(known[order], wanted), len(known) - 1)
        at = order[places]
        if len(missing := wanted[known[at] != wanted]):
            raise FeedError(f"merge_ids: no row came for id {missing[0]}", hint="give all rows")
        made.append(whole[at])
    return made


def _split_rows(op: Operator, scope: FluidScope) -> None:
    """Divides rows by the remainders of their numbers, preserving order."""
    given = scope.selected_rows[op.input("Ids")[0]]
    rows, values, names = np.asarray(given.rows(), np.int64), given.value(), op.output("Out")
    for remainder, name in enumerate(names):
        mine = rows % len(names) == remainder
        made = scope.var(name).get_selected_rows()
        made.set_rows(rows[mine].tolist())
        made.set_height(given.height())
        made.get_tensor().set(values[mine])


def _value(name: str, values: Mapping[str, np.ndarray], scope: FluidScope) -> np.ndarray:
    if name in values:
        return np.asarray(values[name])
    if name in scope:
        return np.asarray(scope.peek(name))
    raise FeedError(f"'{name}' is neither fed nor in the scope", hint="feed it by its name")


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
