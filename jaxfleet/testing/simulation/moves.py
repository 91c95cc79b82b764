"""When a simulated job moves to other servers, as its messages show it.

From the first bye with `moves` until the new servers have answered the load of the checkpoint, the
state is on disk alone, and nothing replays the rest of the move: a process that is lost then, or
is not back yet, ends the job (docs/parameter-servers.md, "Servers that are added or removed").
Trainers wait for each other once more after the load, and go on with their next push.
"""

from dataclasses import dataclass, field
from pathlib import Path

from jaxfleet.transport.messages import Kind, Message


@dataclass
class MoveWatch:
    """Follows the messages of a job.

    Attributes:
        folder: through which the state moves.
    """

    folder: Path
    _movers: set[str] = field(default_factory=set)  # trainers from their byes to their next pushes
    _loads: dict[tuple[str, int], bool] = field(default_factory=dict)  # answered, by server, number

    def see(self, sender: str, receiver: str, message: Message) -> None:
        """Notes a message when it is sent, also one that is lost."""
        if message.kind is Kind.BYE and message.body.get("moves") is True:
            if not self._movers:
                self._loads.clear()
            self._movers.add(sender)
        elif not self._movers:
            return
        elif message.kind is Kind.LOAD:
            if Path(str(message.body.get("path"))).is_relative_to(self.folder):
                self._loads.setdefault((receiver, message.number), False)
        elif message.kind is Kind.OK and (sender, message.number) in self._loads:
            self._loads[sender, message.number] = True
        elif message.kind is Kind.PUSH and self.is_loaded:
            self._movers.discard(sender)

    @property
    def is_loaded(self) -> bool:
        """Whether the new servers have the state, in checkpoints of their own."""
        return bool(self._loads) and all(self._loads.values())

    def needs(self, process: str) -> bool:
        """Whether the loss of a process ends the job now."""
        if process.startswith("server "):
            return bool(self._movers) and not self.is_loaded
        return process in self._movers
