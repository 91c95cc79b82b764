"""Execution of blocks on a server's device, which holds its values; for one thread at a time."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.lower import all_to_device, is_key, to_host
from jaxfleet.ps.gradient_encoding import RowGradient
from jaxfleet.ps.server.execution_plan import NUMBERS, BlockPlan, SentGradients, ServerPlan
from jaxfleet.transport.buffers import aligned_copy, is_aligned

Arrays = Mapping[str, np.ndarray]
_ALL: Arrays = MappingProxyType({})


@dataclass
class ExecutorCounts:
    """Counters of an executor.

    Attributes:
        received: arrays transferred to the device.
        copies_in: copies made of them.
        rows: row slots of blocks that ran on some rows.
        copies_out: arrays copied for transfer to the host.
        block_s: seconds spent in blocks.
        clocked_s: the same by the server's clock, by which saves are due: a simulated job saves at
            the same steps on a machine of any speed.
        last_s: duration in seconds of each block's last run, by index.
    """

    received: int = 0
    copies_in: int = 0
    rows: int = 0
    copies_out: int = 0
    block_s: float = 0.0
    clocked_s: float = 0.0
    last_s: dict[int, float] = field(default_factory=dict)


@dataclass
class BlockExecutor:
    """The values of a server's program, and the execution of its blocks.

    `clock` is the server's. In a simulated job, it stands still while a block runs.
    """

    plan: ServerPlan
    clock: Callable[[], float] = time.monotonic
    counts: ExecutorCounts = field(default_factory=ExecutorCounts)
    _values: dict[str, Any] = field(default_factory=dict)

    def compile(self) -> None:
        for block in self.plan.blocks:
            try:
                block.lowered.compile()
            except RecursionError as error:
                what = f"block {block.index} of '{self.plan.program.name}' is nested too deep"
                raise ProgramError(what, op=self._last_op(block)) from error

    def take_over(self, other: "BlockExecutor") -> None:
        """Takes the values of the same variables for other trainers."""
        self.counts = other.counts
        self._values = other._values  # noqa: SLF001
        self.counts.last_s.clear()  # other executables

    def assign(self, arrays: Arrays) -> Arrays:
        """Assigns values to variables, and returns them as `run` does."""
        self.counts.copies_in += len(arrays)
        self._put({name: aligned_copy(array) for name, array in arrays.items()})
        return self.views(name for name in arrays if name not in self.plan.donated)

    def run(self, block: BlockPlan, sent: SentGradients) -> Arrays:
        """Runs a block, on some rows only if all gradients are sparse and its update allows it.

        If the device shares the host's memory, what is sent may not change before this returns.

        Returns:
            Its results except those that the next step overwrites, as views of the device's memory.

        Raises:
            ProgramError: an operator fails; the error names the block.
        """
        start, began = time.perf_counter(), self.clock()
        joined = block.rows.joined(sent) if block.rows is not None else None
        lowered, arrays = (block.lowered, _whole(sent)) if joined is None else joined
        self.counts.rows += len(arrays[NUMBERS]) if joined is not None else 0
        self._take(arrays)
        try:
            made = lowered.function([self._values[name] for name in lowered.reads])
            self._values.update(zip(lowered.writes, made, strict=True))
            for value in made:
                value.block_until_ready()
        except ProgramError:
            raise
        except Exception as error:
            what = f"block {block.index} of '{self.plan.program.name}': {error}"
            raise ProgramError(what, op=self._last_op(block)) from error
        kept = [name for name in lowered.writes if name not in self.plan.donated]
        views = self.views(kept)
        for name in (*block.passing, *(() if joined is None else (NUMBERS,))):
            del self._values[name]  # frees the received memory
        self.counts.last_s[block.index] = seconds = time.perf_counter() - start
        self.counts.block_s += seconds
        self.counts.clocked_s += self.clock() - began
        return views

    def took_s(self, block: BlockPlan) -> float:
        """Returns the duration of a block's last run in seconds; infinite before the first."""
        return self.counts.last_s.get(block.index, math.inf)

    def views(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Returns variables on the host, without a copy where the device shares its memory."""
        found = {}
        for name in names:
            value = self._values[name]
            found[name], copied = (
                (value, False) if isinstance(value, np.ndarray) else to_host(value)
            )
            self.counts.copies_out += copied
        return found

    def copies(self, names: Iterable[str], rows: Arrays = _ALL) -> dict[str, np.ndarray]:
        """Returns copies of variables, or of their rows, whose memory the next step reuses."""
        views = self.views(names)
        found = {
            name: np.take(array, rows[name], axis=0) if name in rows else array.copy()
            for name, array in views.items()
        }
        self.counts.copies_out += len(found)
        return found

    def results(self) -> dict[str, np.ndarray]:
        """Returns copies of the values that are no state: results that later blocks read."""
        return self.copies(self._values.keys() - self.plan.state.keys())

    def missing(self) -> Collection[str]:
        return self.plan.state.keys() - self._values.keys()

    @property
    def state(self) -> Mapping[str, Any]:
        return {name: self._values[name] for name in self.plan.state if name in self._values}

    def _take(self, sent: Arrays) -> None:
        """Passes host arrays directly to the block, which is faster than a transfer beforehand.

        XLA reads aligned memory in place, and copies unaligned memory.
        """
        keys = {
            name: array
            for name, array in sent.items()
            if name != NUMBERS and is_key(self.plan.known[name].dtype)
        }
        self._put(keys)
        for name in sent.keys() - keys.keys():
            self._values[name] = sent[name]
            self.counts.received += 1
            self.counts.copies_in += not is_aligned(sent[name])

    def _put(self, arrays: Arrays) -> None:
        typed = [(array, self.plan.known[name].dtype) for name, array in arrays.items()]
        for name, (value, copied) in zip(arrays, all_to_device(typed), strict=True):
            self._values[name] = value
            self.counts.received += 1
            self.counts.copies_in += copied

    def _last_op(self, block: BlockPlan) -> object | None:
        ops = self.plan.program.blocks[block.index].ops
        return ops[-1] if ops else None


def _whole(sent: SentGradients) -> dict[str, np.ndarray]:
    return {n: x.whole() if isinstance(x, RowGradient) else x for n, x in sent.items()}
