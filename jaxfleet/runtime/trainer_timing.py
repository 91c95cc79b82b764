"""Times of a trainer for its report: of its compiled blocks alone, and of steps that have run.

The blocks compute with zeros, apart from the job, so that no server is trained by them. What
training steps took is recorded as they run, since a call of a trainer cannot be repeated apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxfleet.ir import Program
from jaxfleet.ir.variable import Variable
from jaxfleet.lower import ExecutableCache
from jaxfleet.lower.host_transfer import host_type, to_device
from jaxfleet.lower.partition import Segment, segments
from jaxfleet.observability import StepSpans, median_times
from jaxfleet.ops import Array
from jaxfleet.report import TimePart
from jaxfleet.runtime.step_timing import Calls

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
    found = median_times(steps)
    waits = sum(took for name, took in found.by_span.items() if name.startswith(_WAIT))
    computes, sends = (found.by_span.get(name, 0.0) for name in (_COMPUTE, _SEND))
    rest = max(0.0, found.whole_s - computes - sends - waits)
    parts = [
        TimePart("a step of training", found.whole_s),
        TimePart("computing: its blocks, until their results are sent", computes),
        TimePart("messages: copied from the device, encoded, handed over", sends),
        TimePart("waiting for servers", waits),
        TimePart("the rest, between these", rest),
    ]
    for number, counted in enumerate(servers):
        took = counted.get("last_blocks_s")
        if isinstance(took, float):
            parts.append(TimePart(f"server {number}: the last run of its blocks", took))
    return parts, len(steps)
