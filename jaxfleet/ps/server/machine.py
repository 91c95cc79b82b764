"""Holds a server's values on the device, and runs blocks on them. One thread at a time uses it."""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.lower import to_device, to_host
from jaxfleet.ps.aligned import aligned_copy, aligned_empty
from jaxfleet.ps.server.plan import BlockPlan, Merge, ServerPlan

Arrays = Mapping[str, np.ndarray]


@dataclass
class Counts:
    """What a machine did.

    Attributes:
        received: arrays that went to the device.
        copies_in: copies that were made of them, merging included.
        copies_out: arrays that were copied on their way to the host.
        merge_s: seconds spent adding gradients.
        block_s: seconds spent in blocks.
    """

    received: int = 0
    copies_in: int = 0
    copies_out: int = 0
    merge_s: float = 0.0
    block_s: float = 0.0


@dataclass
class Machine:
    """The values of one server's program.

    Attributes:
        plan: the program.
        counts: what was done.
    """

    plan: ServerPlan
    counts: Counts = field(default_factory=Counts)
    _values: dict[str, Any] = field(default_factory=dict)
    _buffers: dict[str, np.ndarray] = field(default_factory=dict)

    def compile(self) -> None:
        """Compiles all blocks.

        Raises:
            ProgramError: an operator fails.
        """
        for block in self.plan.blocks:
            block.lowered.compile()

    def assign(self, arrays: Arrays) -> Arrays:
        """Takes values of variables, and returns them as `run` does."""
        for name, array in arrays.items():
            self.counts.copies_in += 1
            self._put(name, aligned_copy(array))
        return self.views(name for name in arrays if name not in self.plan.donated)

    def run(self, block: BlockPlan, sent: Mapping[str, Sequence[np.ndarray]]) -> Arrays:
        """Runs a block.

        Args:
            block: one of the plan's.
            sent: the summands of the gradients it merges, in order; and what came from other
                servers.

        Returns:
            What it makes, but for what the next step overwrites: views of the device's memory.

        Raises:
            ProgramError: an operator fails; it names the block.
        """
        start = time.perf_counter()
        merged = {merge.name for merge in block.merges}
        for merge in block.merges:
            self._merge(merge, sent[merge.name])
        for name in sent.keys() - merged:
            self.counts.copies_in += 1
            self._put(name, aligned_copy(sent[name][0]))
        self.counts.merge_s += (middle := time.perf_counter()) - start
        lowered = block.lowered
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
        self.counts.block_s += time.perf_counter() - middle
        return views

    def views(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Returns variables on the host, without a copy where the device shares its memory."""
        found = {}
        for name in names:
            found[name], copied = to_host(self._values[name])
            self.counts.copies_out += copied
        return found

    def copies(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Returns copies of variables whose memory the next step takes."""
        found = {name: array.copy() for name, array in self.views(names).items()}
        self.counts.copies_out += len(found)
        return found

    def missing(self) -> Collection[str]:
        """Returns the variables of the state that have no value yet."""
        return self.plan.state.keys() - self._values.keys()

    def _merge(self, merge: Merge, arrays: Sequence[np.ndarray]) -> None:
        """Adds summands, in order, into the gradient's buffer: the one copy on the way in."""
        if merge.name not in self._buffers:
            self._buffers[merge.name] = aligned_empty(merge.type.shape, merge.type.dtype)
        buffer = self._buffers[merge.name]
        self.counts.copies_in += len(arrays)
        if len(arrays) == 1:
            np.copyto(buffer, arrays[0])
        else:
            with np.errstate(all="ignore"):  # an infinite gradient is the user's affair, as in XLA
                np.add(arrays[0], arrays[1], out=buffer)
                for array in arrays[2:]:
                    np.add(buffer, array, out=buffer)
        self.counts.received += len(arrays) - 1
        self._put(merge.name, buffer)

    def _put(self, name: str, array: np.ndarray) -> None:
        self._values[name], copied = to_device(array, self.plan.known[name].dtype)
        self.counts.received += 1
        self.counts.copies_in += copied

    def _last_op(self, block: BlockPlan) -> object | None:
        ops = self.plan.program.blocks[block.index].ops
        return ops[-1] if ops else None
