"""When a simulated job moves to other servers, as its messages show it.

A move begins like a change of trainers. From the first bye with `moves` on the state is on disk
alone, and no trainer takes the place of one that is lost. When the new servers have answered the
load of the checkpoint, trainers wait for each other once more, and go on with their next push
(docs/parameter-servers.md, "Servers that are added or removed").
"""

from dataclasses import dataclass, field
from pathlib import Path

from jaxfleet.transport.messages import Kind, Message


@dataclass
class MoveWatch:
    """Follows the messages of a job.

    Attributes:
        folder: through which the state moves.
        lacks_mover: a trainer said bye although another had been killed since the decision.
    """

    folder: Path
    lacks_mover: bool = False
    _lost: set[str] = field(default_factory=set)
    _epoch: int = 0  # of the last decision to move
    _movers: set[str] = field(default_factory=set)  # trainers from their byes to their next pushes
    # Whether each load is answered, by server, trainer and number.
    _loads: dict[tuple[str, str, int], bool] = field(default_factory=dict)

    def see(self, sender: str, receiver: str, message: Message) -> None:
        """Notes a message when it is sent, also one that is lost."""
        epoch = message.body.get("epoch")
        if "moves_to" in message.body and isinstance(epoch, int) and epoch > self._epoch:
            self._epoch = epoch
            self._loads.clear()
            self._lost.clear()  # the decision takes it out, if it was known
        elif message.kind is Kind.BYE and message.body.get("moves") is True:
            self._movers.add(sender)
            self.lacks_mover |= bool(self._lost)
        elif message.kind is Kind.LOAD:
            if Path(str(message.body.get("path"))).is_relative_to(self.folder):
                self._loads.setdefault((receiver, sender, message.number), False)
        elif message.kind is Kind.OK and (sender, receiver, message.number) in self._loads:
            self._loads[sender, receiver, message.number] = True
        elif message.kind is Kind.PUSH and self._is_loaded:
            self._movers.discard(sender)

    @property
    def _is_loaded(self) -> bool:
        """Whether the new servers have the state, in checkpoints of their own."""
        return bool(self._loads) and all(self._loads.values())

    def needs(self, trainer: str) -> bool:
        """Whether the loss of a trainer may end the job now."""
        # From the first bye on, others wait in vain for one that has not said its own.
        return trainer in self._movers or (bool(self._movers) and not self._is_loaded)

    def lose(self, trainer: str) -> None:
        """Notes a trainer that was killed: those that move without it wait for it in vain."""
        self._lost.add(trainer)
