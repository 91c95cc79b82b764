"""The request log of a trainer: a request that comes again is done once, and answered again."""

from dataclasses import dataclass, field

from jaxfleet.ps.messages import Kind, Message

# Reads may be done twice; reductions and barriers have logs of their own, which hold the arrays.
_ONCE = frozenset({Kind.DEFINE, Kind.ASSIGN, Kind.SAVE, Kind.LOAD, Kind.SHRINK, Kind.BYE})
_PUSHES = frozenset({Kind.PUSH, Kind.PUSH_ROWS})
_MOST = 64  # answers that are kept; a trainer that waits has few requests under way


@dataclass
class RequestLog:
    """The requests of one process that must not be done twice, and the answers to the last ones.

    Attributes:
        pending: the numbers of those that are not answered yet.
    """

    pending: set[int] = field(default_factory=set)
    _answers: dict[int, Message] = field(default_factory=dict)

    def begin(self, message: Message) -> bool:
        """Notes a request; returns False if it came before, and is not to be done again."""
        number = message.number
        if message.kind in _PUSHES or not number:
            return True
        if number in self.pending or number in self._answers:
            return False
        if message.kind in _ONCE:
            self.pending.add(number)
        return True

    def end(self, answer: Message) -> None:
        """Keeps an answer that a request may need again: any error, and those of `begin`."""
        number = answer.number
        if number in self.pending or (answer.kind is Kind.ERROR and number):
            self.pending.discard(number)
            self._answers[number] = answer
            if len(self._answers) > _MOST:
                del self._answers[next(iter(self._answers))]

    def answer(self, number: int) -> Message | None:
        """Returns the answer to a request, if it was given and is kept."""
        return self._answers.get(number)
