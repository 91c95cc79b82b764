"""Times of programs that executors run, for the dumps of their passes.

An executor's run takes the memory of its state and keeps the results, so the timed calls begin with
a copy of the state, and go on with what they compute themselves.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxfleet.pipeline import write_facts
from jaxfleet.report import Measured
from jaxfleet.runtime.step_timing import Calls, measured
from jaxfleet.runtime.transpile import DumpSeries, calls_to_measure

_Values: TypeAlias = Mapping[str, Any]
# From donated state, kept state and data to fetches and new state
Function: TypeAlias = Callable[[_Values, _Values, _Values], tuple[Any, _Values]]

_OWN = "Its calls compute with a copy of the state and this batch."


@dataclass
class FirstRunTimer:
    """Times a program at its first run, and adds the times to its dump.

    Attributes:
        folder: of the dump.
        calls: how many to time.
    """

    folder: Path
    calls: int
    _is_done: bool = False

    @classmethod
    def of(cls, series: DumpSeries | None) -> "FirstRunTimer | None":
        """Returns the timer of a program whose passes are dumped; None unless it is asked for."""
        calls = calls_to_measure()
        if not calls or series is None or series.folder is None:
            return None
        return cls(series.folder, calls)

    def look(
        self, function: Function, given: _Values, kept: _Values, data: _Values, *, ranks: int = 1
    ) -> None:
        """Times calls of the function, unless it has; `data` are the rows of all ranks."""
        if self._is_done:
            return
        self._is_done = True

        def step(state: _Values, _: None) -> tuple[_Values, Any]:
            fetched, written = function(state, kept, data)
            return {name: written[name] for name in state}, (fetched, written)

        def inputs() -> Calls:
            own = {name: jnp.array(value, copy=True) for name, value in given.items()}
            return Calls(step, own, None, _OWN)

        timing = measured(_devices_of((*given.values(), *kept.values())), inputs, self.calls)
        add_times(self.folder, timing, rows_of_one(data, ranks))


def _devices_of(values: Iterable[Any]) -> Sequence[Any]:
    """Returns the devices of the first array, which a program's other arrays share."""
    first = next((value for value in values if isinstance(value, jax.Array)), None)
    if first is None:
        return jax.devices()[:1]
    return sorted(first.devices(), key=lambda device: int(device.id))


def timed(function: Function, timer: FirstRunTimer) -> Function:
    """Returns a program's function whose first call is timed before it runs."""

    def run(given: _Values, kept: _Values, data: _Values) -> tuple[Any, _Values]:
        timer.look(function, given, kept, data)
        return function(given, kept, data)

    return run


def rows_of_one(data: Mapping[str, Any], ranks: int) -> int | None:
    """Returns the rows of one rank, from the first array that has any."""
    return next((np.shape(x)[0] // ranks for x in data.values() if np.ndim(x)), None)


def add_times(folder: Path, timing: Measured, rows: int | None) -> None:
    """Adds times to a dump, and the number of rows that they are for."""
    write_facts(folder, {"measured": asdict(timing), "rows": rows})
