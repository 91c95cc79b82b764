"""Keeps what trainers and other servers sent for steps, until blocks take it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.ps.messages import Tensor
from jaxfleet.ps.row_gradients import RowGradient, taken
from jaxfleet.ps.server.plan import BlockPlan, Merge, ServerPlan
from jaxfleet.ps.server.row_blocks import Sent

Gradient = np.ndarray | RowGradient


@dataclass
class Summands:
    """Gradients of trainers, and parts of sums that other servers made, by step.

    Attributes:
        plan: the server's program.
        left: trainers that are not waited for: their summands are zeros.
        queued_bytes: of what waits.
    """

    plan: ServerPlan
    left: set[int]
    queued_bytes: int = 0
    _pushed: dict[int, dict[str, dict[int, Gradient]]] = field(default_factory=dict)
    _parts: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    _rows: dict[int, tuple[int, int]] = field(default_factory=dict)  # and whose, by step

    def restart(self, step: int) -> None:
        """Forgets what came for a step and those before it."""
        self._pushed = {later: found for later, found in self._pushed.items() if later > step}
        self._parts = {later: parts for later, parts in self._parts.items() if later > step}
        self._rows = {later: rows for later, rows in self._rows.items() if later > step}
        self.queued_bytes = self._count_bytes()

    def add(self, step: int, trainer: int, tensor: Tensor) -> bool:
        """Takes a gradient; one that came before changes nothing. Tells whether it is new."""
        by_trainer = self._pushed.setdefault(step, {}).setdefault(tensor.name, {})
        if trainer in by_trainer:
            return False
        by_trainer[trainer] = taken(tensor)
        self.queued_bytes += by_trainer[trainer].nbytes
        return True

    def add_parts(self, step: int, tensors: Iterable[Tensor]) -> int:
        """Takes what another server sent; returns how many came again, which change nothing."""
        parts, again = self._parts.setdefault(step, {}), 0
        for tensor in tensors:
            if tensor.name in parts:
                again += 1
                continue
            parts[tensor.name] = tensor.array
            self.queued_bytes += tensor.array.nbytes
        return again

    def note_rows(self, step: int, trainer: int, rows: int) -> None:
        """Notes how many rows the whole batch has, as the first trainer says."""
        self._rows.setdefault(step, (trainer, rows))

    def other_rows(self, step: int, trainer: int, rows: int) -> str | None:
        """Says whose batch has another number of rows, if one's has: their sums do not add up."""
        first, known = self._rows.get(step, (trainer, rows))
        if not rows or rows == known:
            return None
        found = f"the batch of step {step} has {rows} rows on trainer {trainer}"
        return f"{found}, and {known} on trainer {first}"

    def has_all(self, step: int, merges: Sequence[Merge]) -> bool:
        """Tells whether the gradients of all who are waited for came."""
        pushed = self._pushed.get(step, {})
        if self.left:
            return all(self._has(merge, pushed.get(merge.name, {})) for merge in merges)
        return all(len(pushed.get(merge.name, ())) == len(merge.senders) for merge in merges)

    def has_parts(self, step: int) -> bool:
        """Tells whether what other servers send for a step came."""
        exchange = self.plan.exchange
        return exchange is None or exchange.there.keys() <= self._parts.get(step, {}).keys()

    def missing(self, step: int, block: BlockPlan) -> Iterator[tuple[str, str]]:
        """Yields who did not send what a block needs, with its name."""
        pushed, parts = self._pushed.get(step, {}), self._parts.get(step, {})
        for merge in block.merges:
            for trainer in self._awaited(merge):
                if trainer not in pushed.get(merge.name, {}):
                    yield f"trainer {trainer}", merge.name
        if block.exchanges and self.plan.exchange is not None:
            for name, server in self.plan.exchange.there.items():
                if name not in parts:
                    yield f"server {server}", name

    def take(self, step: int, block: BlockPlan) -> Sent:
        """Returns what was sent for a block, and keeps it no longer."""
        pushed = self._pushed.get(step, {})
        sent: dict[str, Gradient] = {}
        for merge in block.merges:
            by_trainer = pushed.pop(merge.name)
            sent.update((merge.summand(trainer), array) for trainer, array in by_trainer.items())
            self.queued_bytes -= sum(array.nbytes for array in by_trainer.values())
            if len(by_trainer) < len(merge.senders):
                sent.update(self._zeros(merge, by_trainer))
        if block.exchanges and self.plan.exchange is not None:
            parts = self._parts.get(step, {})  # none where no other server takes part
            sent.update((name, parts[name]) for name in self.plan.exchange.there)
        return sent

    def forget(self, step: int) -> None:
        """Forgets a step whose blocks all ran."""
        self._pushed.pop(step, None)
        self._rows.pop(step, None)
        for array in self._parts.pop(step, {}).values():
            self.queued_bytes -= array.nbytes

    def _has(self, merge: Merge, by_trainer: Mapping[int, Gradient]) -> bool:
        """Tells whether all came who still send; where nobody did, there is no such step."""
        return bool(by_trainer) and by_trainer.keys() >= set(self._awaited(merge))

    def _awaited(self, merge: Merge) -> list[int]:
        return [trainer for trainer in merge.senders if trainer not in self.left]

    def _zeros(
        self, merge: Merge, by_trainer: Mapping[int, Gradient]
    ) -> Iterator[tuple[str, Gradient]]:
        """Yields what those sent who left."""
        for trainer in merge.senders:
            if trainer in by_trainer:
                continue
            if merge.name in self.plan.by_rows:
                yield merge.summand(trainer), RowGradient.none(merge.type)
            else:
                yield merge.summand(trainer), np.zeros(merge.type.shape, merge.type.dtype)

    def _count_bytes(self) -> int:
        pushed = (by for names in self._pushed.values() for by in names.values())
        parts = sum(array.nbytes for names in self._parts.values() for array in names.values())
        return parts + sum(array.nbytes for by in pushed for array in by.values())
