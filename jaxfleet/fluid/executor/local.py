"""Runs programs on one device."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxfleet.fluid.distributed.worker_program import without_rows
from jaxfleet.fluid.drawing import RUN
from jaxfleet.fluid.feeding import Feed, fed_values, warn_empty, warn_unknown
from jaxfleet.fluid.fetched_array import FetchedArray
from jaxfleet.fluid.memory_budget import MemoryBudget
from jaxfleet.fluid.places import device_to_choose
from jaxfleet.fluid.plans import Names, Plan, Plans
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.ragged_values import fetched_sequences
from jaxfleet.runtime.prepared import missing_state, not_fed
from jaxfleet.runtime.scope import Scope


class LocalRuns:
    """Runs programs on a place, and keeps them ready.

    Args:
        place: it.
    """

    def __init__(self, place: Any) -> None:
        self._place = place
        self._plans = Plans(self._on)
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
        """Runs a program once; returns what is fetched.

        What stands here is paid at every step, and by caches that the step before has emptied.

        Args:
            program: it.
            feed: values by name.
            fetch: the names that are fetched.
            scope: where the state is.
            draw: gives what a run's random operators draw by.
            return_numpy: return numpy arrays of the caller's own; if not, JAX's, and LoDTensors
                of sequences.
            budget: the memory that the run may take; None for whatever it takes.

        Raises:
            FeedError: what is fed, fetched or in the scope does not fit.
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
        if not all([value.size for value in data.values()]):  # noqa: C419  # quicker than a generator
            warn_empty(data)
        if plan.draws:
            data[RUN] = draw(program)
        if not (return_numpy and fetch):
            # JAX reads numpy's memory while the run lasts, and nobody would wait for its end.
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
        """Returns the device that JAX must be told to run on; None where it does so by itself."""
        if not self._knows_device:
            self._device, self._knows_device = device_to_choose(self._place), True
        return self._device

    def clear(self) -> None:
        """Lets all programs go."""
        self._plans.clear()


def _put(plan: Plan, feed: Feed, scope: Scope) -> None:
    """Puts what is fed to persistable variables into the scope, where the run reads them."""
    for name, rule in plan.puts:
        scope.keep({name: jax.numpy.array(rule.take(feed[name]), copy=True)})


def _data(plan: Plan, feed: Feed) -> dict[str, Any]:
    try:
        if plan.has_sequences:
            return {v.name: feed[v.name] for v in plan.prepared.data if v.name != RUN}
        return {name: rule.take(feed[name]) for name, rule in plan.data}
    except KeyError as error:
        names = [name for name, _ in plan.data]
        missing = str(error.args[0])
        raise not_fed(plan.prepared.program, missing, names, plan.unknown) from None


def _state(program: Program, plan: Plan, scope: Scope) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the state whose memory the run takes, and that which it only reads."""
    try:
        given = {name: scope.give(name) for name in plan.given}
        return given, {name: scope.peek(name) for name in plan.state}
    except KeyError as error:
        name = str(error.args[0])
        found = without_rows(program, name) or missing_state(plan.prepared.program, name)
        raise found from None
