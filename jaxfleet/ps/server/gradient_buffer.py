"""Buffer of the gradients and partial sums of steps whose blocks have not run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.ps.gradient_encoding import RowGradient, gradient_of
from jaxfleet.ps.server.execution_plan import BlockPlan, Merge, SentGradients, ServerPlan
from jaxfleet.transport.messages import Tensor

Gradient = np.ndarray | RowGradient


@dataclass
class GradientBuffer:
    """Gradients of trainers and partial sums of other servers, by step.

    The summands of trainers that left are zeros.
    """

    plan: ServerPlan
    left: set[int]
    queued_bytes: int = 0
    _pushed: dict[int, dict[str, dict[int, Gradient]]] = field(default_factory=dict)
    _parts: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    _rows: dict[int, tuple[int, int]] = field(default_factory=dict)  # by step, with the trainer

    def restart(self, step: int) -> None:
        """Discards a step and those before it."""
        self._pushed = {later: found for later, found in self._pushed.items() if later > step}
        self._parts = {later: parts for later, parts in self._parts.items() if later > step}
        self._rows = {later: rows for later, rows in self._rows.items() if later > step}
        self.queued_bytes = self._count_bytes()

    def add(self, step: int, trainer: int, tensor: Tensor) -> bool:
        """Adds a gradient; returns False for a duplicate, which is ignored."""
        by_trainer = self._pushed.setdefault(step, {}).setdefault(tensor.name, {})
        if trainer in by_trainer:
            return False
        by_trainer[trainer] = gradient_of(tensor)
        self.queued_bytes += by_trainer[trainer].nbytes
        return True

    def add_parts(self, step: int, tensors: Iterable[Tensor]) -> int:
        """Adds another server's partial sums; returns the number of (ignored) duplicates."""
        parts, again = self._parts.setdefault(step, {}), 0
        for tensor in tensors:
            if tensor.name in parts:
                again += 1
                continue
            parts[tensor.name] = tensor.array
            self.queued_bytes += tensor.array.nbytes
        return again

    def note_rows(self, step: int, trainer: int, rows: int) -> None:
        """Records the number of rows of the global batch, as the first trainer reports it."""
        self._rows.setdefault(step, (trainer, rows))

    def other_rows(self, step: int, trainer: int, rows: int) -> str | None:
        """Describes a batch whose number of rows differs, since such sums are inconsistent."""
        first, known = self._rows.get(step, (trainer, rows))
        if not rows or rows == known:
            return None
        found = f"the batch of step {step} has {rows} rows on trainer {trainer}"
        return f"{found}, and {known} on trainer {first}"

    def has_all(self, step: int, merges: Sequence[Merge]) -> bool:
        """Whether the gradients of all awaited trainers have arrived."""
        pushed = self._pushed.get(step, {})
        if self.left:
            return all(self._has(merge, pushed.get(merge.name, {})) for merge in merges)
        return all(len(pushed.get(merge.name, ())) == len(merge.senders) for merge in merges)

    def has_parts(self, step: int) -> bool:
        exchange = self.plan.exchange
        return exchange is None or exchange.there.keys() <= self._parts.get(step, {}).keys()

    def missing(self, step: int, block: BlockPlan) -> Iterator[tuple[str, str]]:
        """Yields the peers and names of missing inputs of a block."""
        pushed, parts = self._pushed.get(step, {}), self._parts.get(step, {})
        for merge in block.merges:
            for trainer in self._awaited(merge):
                if trainer not in pushed.get(merge.name, {}):
                    yield f"trainer {trainer}", merge.name
        if block.exchanges and self.plan.exchange is not None:
            for name, server in self.plan.exchange.there.items():
                if name not in parts:
                    yield f"server {server}", name

    def take(self, step: int, block: BlockPlan) -> SentGradients:
        """Removes and returns the inputs of a block."""
        pushed = self._pushed.get(step, {})
        sent: dict[str, Gradient] = {}
        for merge in block.merges:
            by_trainer = pushed.pop(merge.name)
            sent.update((merge.summand(trainer), array) for trainer, array in by_trainer.items())
            self.queued_bytes -= sum(array.nbytes for array in by_trainer.values())
            if len(by_trainer) < len(merge.senders):
                sent.update(self._zeros(merge, by_trainer))
        if block.exchanges and self.plan.exchange is not None:
            parts = self._parts.get(step, {})  # empty if no other server takes part
            sent.update((name, parts[name]) for name in self.plan.exchange.there)
        return sent

    def forget(self, step: int) -> None:
        self._pushed.pop(step, None)
        self._rows.pop(step, None)
        for array in self._parts.pop(step, {}).values():
            self.queued_bytes -= array.nbytes

    def _has(self, merge: Merge, by_trainer: Mapping[int, Gradient]) -> bool:
        """Whether all awaited trainers have sent a gradient, and at least one has."""
        return bool(by_trainer) and by_trainer.keys() >= set(self._awaited(merge))

    def _awaited(self, merge: Merge) -> list[int]:
        return [trainer for trainer in merge.senders if trainer not in self.left]

    def _zeros(
        self, merge: Merge, by_trainer: Mapping[int, Gradient]
    ) -> Iterator[tuple[str, Gradient]]:
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
