"""Buffers of what arrived for steps that have not run: gradients, partial sums and rows."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from jaxfleet.ps.gradient_encoding import RowGradient, gradient_of
from jaxfleet.ps.server.execution_plan import BlockPlan, Merge, SentGradients, ServerPlan
from jaxfleet.transport.messages import Tensor

Gradient = np.ndarray | RowGradient
T = TypeVar("T")


@dataclass
class StepBuffer(Generic[T]):
    """What trainers pushed, by step, name and trainer; those that `left` are not waited for."""

    size: Callable[[T], int]
    left: AbstractSet[int]
    bytes: int = 0
    _pushed: dict[int, dict[str, dict[int, T]]] = field(default_factory=dict)

    def restart(self, step: int) -> None:
        """Discards a step and those before it."""
        for old in [known for known in self._pushed if known <= step]:
            self.forget(old)

    def clear(self) -> None:
        """Discards all steps."""
        self._pushed.clear()
        self.bytes = 0

    def forget(self, step: int) -> None:
        for by_trainer in self._pushed.pop(step, {}).values():
            self.bytes -= sum(map(self.size, by_trainer.values()))

    def add(self, step: int, name: str, trainer: int, push: T) -> bool:
        """Adds a push; returns False for a duplicate, which is ignored."""
        by_trainer = self._pushed.setdefault(step, {}).setdefault(name, {})
        if trainer in by_trainer:
            return False
        by_trainer[trainer] = push
        self.bytes += self.size(push)
        return True

    def take(self, step: int, name: str) -> dict[int, T]:
        """Removes and returns the pushes of a name, by trainer."""
        by_trainer = self._pushed[step].pop(name)
        self.bytes -= sum(map(self.size, by_trainer.values()))
        return by_trainer

    def missing(self, step: int, name: str, senders: Iterable[int]) -> set[int]:
        """Returns the awaited trainers that have not pushed."""
        return {t for t in senders if t not in self.left} - self._of(step, name).keys()

    def has_all(self, step: int, name: str, senders: Collection[int]) -> bool:
        """Whether all awaited trainers have pushed, and at least one has."""
        came = self._of(step, name)
        if len(came) == len(senders):
            return True
        return bool(came and self.left) and not self.missing(step, name, senders)

    def _of(self, step: int, name: str) -> dict[int, T]:
        return self._pushed.get(step, {}).get(name, {})


def _size(gradient: Gradient) -> int:
    return gradient.nbytes


@dataclass
class GradientBuffer:
    """Gradients of trainers and partial sums of other servers, by step.

    The summands of trainers that left are zeros.
    """

    plan: ServerPlan
    left: set[int]
    _pushed: StepBuffer[Gradient] = field(init=False)
    _parts: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    _rows: dict[int, tuple[int, int]] = field(default_factory=dict)  # by step, with the trainer

    def __post_init__(self) -> None:
        self._pushed = StepBuffer(_size, self.left)

    @property
    def queued_bytes(self) -> int:
        parts = (array.nbytes for parts in self._parts.values() for array in parts.values())
        return self._pushed.bytes + sum(parts)

    def restart(self, step: int) -> None:
        self._pushed.restart(step)
        self._parts = {later: parts for later, parts in self._parts.items() if later > step}
        self._rows = {later: rows for later, rows in self._rows.items() if later > step}

    def clear(self) -> None:
        self._pushed.clear()
        self._parts.clear()
        self._rows.clear()

    def add(self, step: int, trainer: int, tensor: Tensor) -> bool:
        return self._pushed.add(step, tensor.name, trainer, gradient_of(tensor))

    def add_parts(self, step: int, tensors: Iterable[Tensor]) -> int:
        """Adds another server's partial sums; returns the number of (ignored) duplicates."""
        parts, again = self._parts.setdefault(step, {}), 0
        for tensor in tensors:
            if tensor.name in parts:
                again += 1
            else:
                parts[tensor.name] = tensor.array
        return again

    def note_rows(self, step: int, trainer: int, rows: int) -> None:
        """Records the number of rows of the global batch, as the first trainer reports it."""
        self._rows.setdefault(step, (trainer, rows))

    def other_rows(self, step: int, trainer: int, rows: int) -> str | None:
        first, known = self._rows.get(step, (trainer, rows))
        if not rows or rows == known:
            return None
        found = f"the batch of step {step} has {rows} rows on trainer {trainer}"
        return f"{found}, and {known} on trainer {first}"

    def has_all(self, step: int, merges: Sequence[Merge]) -> bool:
        """Whether the gradients of all awaited trainers have arrived."""
        return all(self._pushed.has_all(step, merge.name, merge.senders) for merge in merges)

    def take_over(self, other: "GradientBuffer") -> None:
        """Takes the partial sums of another buffer, which do not depend on who trains."""
        self._parts = other._parts  # noqa: SLF001

    def has_parts(self, step: int) -> bool:
        exchange = self.plan.exchange
        return exchange is None or exchange.there.keys() <= self._parts.get(step, {}).keys()

    def missing(self, step: int, block: BlockPlan) -> Iterator[tuple[str, str]]:
        """Yields the peers and names of missing inputs of a block."""
        for merge in block.merges:
            for trainer in sorted(self._pushed.missing(step, merge.name, merge.senders)):
                yield f"trainer {trainer}", merge.name
        if block.exchanges and self.plan.exchange is not None:
            for name, server in self.plan.exchange.there.items():
                if name not in self._parts.get(step, {}):
                    yield f"server {server}", name

    def take(self, step: int, block: BlockPlan) -> SentGradients:
        sent: dict[str, Gradient] = {}
        for merge in block.merges:
            by_trainer = self._pushed.take(step, merge.name)
            sent.update((merge.summand(trainer), array) for trainer, array in by_trainer.items())
            absent = [trainer for trainer in merge.senders if trainer not in by_trainer]
            sent.update((merge.summand(trainer), self._zeros(merge)) for trainer in absent)
        if block.exchanges and self.plan.exchange is not None:
            parts = self._parts.get(step, {})  # empty if no other server takes part
            sent.update((name, parts[name]) for name in self.plan.exchange.there)
        return sent

    def _zeros(self, merge: Merge) -> Gradient:
        if merge.name in self.plan.by_rows:
            return RowGradient.none(merge.type)
        return np.zeros(merge.type.shape, merge.type.dtype)

    def forget(self, step: int) -> None:
        self._pushed.forget(step)
        self._rows.pop(step, None)
        self._parts.pop(step, None)
