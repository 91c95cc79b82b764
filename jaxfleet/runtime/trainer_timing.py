"""Times of a trainer for its report: of its compiled blocks alone, and of steps that have run.

The blocks compute with zeros, apart from the job, so that no server is trained by them. What
training steps took is recorded as they run, since a call of a trainer cannot be repeated apart.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import jax
import numpy as np

from jaxfleet.errors import JaxfleetError
from jaxfleet.ir import Program
from jaxfleet.ir.variable import Variable
from jaxfleet.lower import ExecutableCache
from jaxfleet.lower.host_transfer import host_type, to_device
from jaxfleet.lower.partition import Segment, segments
from jaxfleet.observability import StepSpans, StepTimes
from jaxfleet.ops import Array
from jaxfleet.ps.client.client import Client
from jaxfleet.report import Measured, TimePart
from jaxfleet.runtime.program_timing import FirstRunTimer, add_times, rows_of_one
from jaxfleet.runtime.step_timing import Calls, measured
from jaxfleet.transport.messages import Kind

BLOCKS = "its compiled blocks, without messages"
_FEWEST_ROWS = 8  # of a table, for keys of zeros
_OWN_TABLES = "The rows of its tables are zeros."
_COMPUTE, _SEND, _WAIT = "compute", "send", "wait for "


@dataclass
class _Blocks:
    """The compiled blocks of a trainer's program, as one function."""

    segments: Sequence[Segment]

    def __call__(self, given: Mapping[str, Any], _: None) -> tuple[Mapping[str, Any], list[Any]]:
        values, made = dict(given), list[Any]()
        for segment in self.segments:
            outputs = segment.run(np.int32(0), *[values[name] for name in segment.reads])
            values.update(zip(segment.writes, outputs, strict=False))  # a watched one has one more
            made.extend(outputs)
        return given, made


def blocks_of(program: Program, sizes: Mapping[str, int], cache: ExecutableCache) -> Calls:
    """Returns the blocks of a trainer's program as a step, with zeros for what they read.

    Args:
        program: the trainer's.
        sizes: a number for each letter; of the rows of tables, if a step has run.
        cache: of executables, so that the blocks are those of training.
    """
    letters = {
        letter
        for block in program.blocks
        for variable in (*program.variables.values(), *block.variables.values())
        for size in variable.shape
        if not isinstance(size, int)
        for letter in size.letters
    }
    known = {**dict.fromkeys(letters, _FEWEST_ROWS), **sizes}
    declared, items = segments(program, known, cache=cache)
    parts = [item for item in items if isinstance(item, Segment)]
    read = dict.fromkeys(name for part in parts for name in part.reads)
    zeros = {name: _zeros(declared.lookup(name)) for name in read}
    note = _OWN_TABLES if "tables" in program.attrs else ""
    return Calls(_Blocks(parts), zeros, None, note, BLOCKS)


def _zeros(variable: Variable) -> Array:
    of = host_type(variable)
    return to_device(np.zeros(of.shape, of.dtype), variable.dtype)[0]


def counters_of_servers(client: Client) -> list[Mapping[str, Any]]:
    """Returns the counters of every server."""
    asked = [client.request(n, Kind.STATS) for n in range(len(client.me.endpoints))]
    client.wait(asked)
    return [dict(each.answer.body) if each.answer is not None else {} for each in asked]


def times_of_training(
    spans: StepSpans, count: int, servers: Sequence[Mapping[str, Any]]
) -> tuple[list[TimePart], int]:
    """Returns what the newest steps took, by kind of work, and the number of those steps.

    Args:
        spans: of this trainer.
        count: the most steps.
        servers: the counters of every server, for the time of its blocks; may be empty.
    """
    steps = spans.newest(count)
    if not steps:
        return [], 0
    by_kind = [(_of(x, _COMPUTE), _of(x, _SEND), _of(x, _WAIT)) for x in steps]
    computes, sends, waits = (median(each) for each in zip(*by_kind, strict=True))
    rests = [max(0.0, x.whole_s - sum(own)) for x, own in zip(steps, by_kind, strict=True)]
    parts = [
        TimePart("a step of training", median(x.whole_s for x in steps)),
        TimePart("computing: its blocks, until their results are sent", computes),
        TimePart("messages: copied from the device, encoded, handed over", sends),
        TimePart("waiting for servers", waits),
        TimePart("the rest, between these", median(rests)),
    ]
    for number, counted in enumerate(servers):
        took = counted.get("last_blocks_s")
        if isinstance(took, float):
            parts.append(TimePart(f"server {number}: the last run of its blocks", took))
    return parts, len(steps)


def _of(step: StepTimes, prefix: str) -> float:
    return sum(took for name, took in step.by_span.items() if name.startswith(prefix))


@dataclass
class TrainerTimer:
    """Times a fluid trainer: its compiled blocks at first, and steps once enough have run.

    Attributes:
        first: has the folder of the dump and the number of calls.
        client: of the trainer.
        cache: of executables.
    """

    first: FirstRunTimer
    client: Client
    cache: ExecutableCache
    _steps: int = 0
    _blocks: Measured = field(init=False)
    _rows: int | None = None  # for which the blocks were timed

    def __post_init__(self) -> None:
        self.spans = StepSpans(self.client.spans)
        self.client.spans = self.spans

    def before_step(
        self, program: Program, sizes: Mapping[str, int], data: Mapping[str, Any]
    ) -> None:
        """Adds times to the dump before the first step, and after as many as are timed."""
        calls, number = self.first.calls, self._steps
        self._steps += 1
        if number == 0:
            devices, self._rows = jax.devices()[:1], rows_of_one(data, 1)
            self._blocks = measured(devices, lambda: blocks_of(program, sizes, self.cache), calls)
            add_times(self.first.folder, self._blocks, self._rows)
        elif number == calls + 1:
            counters: list[Mapping[str, Any]] = []
            with suppress(JaxfleetError):  # a server may be away; the job goes on
                counters = counters_of_servers(self.client)
            parts, steps = times_of_training(self.spans, calls, counters)
            add_times(
                self.first.folder, replace(self._blocks, parts=parts, steps=steps), self._rows
            )
