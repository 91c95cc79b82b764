"""The ledger of a server, as its pushes and checkpoints refer to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxfleet.errors import CheckpointError
from jaxfleet.ps.server.data_ledger import DataLedger
from jaxfleet.ps.server.outbox import Request, RequestError
from jaxfleet.ps.server.position_set import PositionSet
from jaxfleet.transport.messages import Message, Plain

_MOST_SPANS = 1 << 16  # of one push: as many as steps whose gradients it merges
_MOST_POSITION = 1 << 62

StepOf = Callable[[int], int]  # returns the last applied step of a trainer


def read_spans(plain: Plain) -> PositionSet:
    """Returns the positions in a list of `[start, stop]`.

    Raises:
        RequestError: it is not such a list.
    """
    found = []
    for span in plain if isinstance(plain, list) and len(plain) <= _MOST_SPANS else [None]:
        start, stop = span if isinstance(span, list) and len(span) == 2 else (None, None)
        is_span = type(start) is int and type(stop) is int and 0 <= start < stop < _MOST_POSITION
        if not is_span:
            raise RequestError("bad_message", "leases are a list of [start, stop]")
        found.append((start, stop))
    return PositionSet.of(found)  # type: ignore[arg-type]  # checked above


def pushed_positions(message: Message) -> PositionSet | None:
    """Returns the positions whose effect a push contains; None if it names none.

    Raises:
        RequestError: they are malformed.
    """
    plain = message.body.get("leases")
    return None if plain is None else read_spans(plain)


@dataclass
class LeaseRecord:
    """A job's ledger; None until a trainer leases samples."""

    ledger: DataLedger | None = None

    def push(self, request: Request, positions: PositionSet, applied: int) -> None:
        """Records the positions of a push, unless it is a duplicate of an applied one."""
        if self.ledger is not None and request.step > applied:
            self.ledger.push(request.trainer, request.step, positions)

    def settle(self, step_of: StepOf) -> None:
        """Acknowledges what is applied."""
        if self.ledger is not None:
            for trainer in list(self.ledger.pushed):
                self.ledger.settle(trainer, step_of(trainer))

    def position(self, step_of: StepOf) -> dict[str, Plain] | None:
        """Returns what is done, as of the applied steps, for a checkpoint."""
        self.settle(step_of)
        return None if self.ledger is None else self.ledger.position()

    def stats(self, step_of: StepOf) -> dict[str, Plain]:
        self.settle(step_of)
        return {} if self.ledger is None else self.ledger.stats()

    def load(self, position: Mapping[str, object] | None) -> None:
        """Goes on from the position of a checkpoint; without one, a loader begins anew.

        Raises:
            CheckpointError: it is not a position.
        """
        try:
            self.ledger = None if position is None else DataLedger.read(position)
        except ValueError as error:
            what = f"the position of the data in the checkpoint is damaged: {error}"
            raise CheckpointError(what) from error
