"""Requests under way: what was asked of which server, and what has come back so far."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxfleet.ps.messages import Message, Tensor


@dataclass(eq=False)
class Request:
    """One request to one server, until all of its answer is there.

    Attributes:
        server: which server.
        message: as it was sent, and is sent again where that server starts again.
        wants: the names that its answer has still to bring; empty where any answer will do.
        sink: takes arrays as they come.
        answer: the last message of the answer, once it is complete.
    """

    server: int
    message: Message
    wants: set[str] = field(default_factory=set)
    sink: Callable[[Sequence[Tensor]], None] | None = None
    answer: Message | None = None

    @property
    def is_done(self) -> bool:
        """Tells whether all of the answer is there."""
        return self.answer is not None

    def take(self, message: Message) -> None:
        """Takes an answer, or a part of it; one that came before changes nothing."""
        fresh = [x for x in message.tensors if not self.wants or x.name in self.wants]
        if self.sink is not None and fresh:
            self.sink(fresh)
        self.wants.difference_update(tensor.name for tensor in fresh)
        if not self.wants:
            self.answer = message

    def __str__(self) -> str:
        body, kind = self.message.body, self.message.kind.value
        names = sorted(self.wants)
        if names:
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            return f"{kind} of {', '.join(names[:2])}{more}"
        if kind == "look_up":
            return f"rows of table '{body.get('table')}'"
        if kind in {"shrink", "export"}:
            return f"{kind} of table '{body.get('table')}'"
        if kind == "reduce":
            return f"sum '{body.get('key')}' over all trainers"
        if kind == "barrier":
            return f"barrier '{body.get('name')}'"
        return kind
