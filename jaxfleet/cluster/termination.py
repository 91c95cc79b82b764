"""Termination: the reason why a group ended, in the same words on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxfleet.errors import JaxfleetError, PeerLostError, ProgramError
from jaxfleet.transport.consistency import same_leaves_hint
from jaxfleet.transport.messages import Plain

_TOGETHER = (
    "run the same script, with the same arguments and data of the same shapes, on each rank; "
    "step.save, step.restore and step.pull are called by every rank, too"
)
CHANGED_STATE = "the state that was changed"  # the place where ranks compare their changes of it
_AS_MANY = "let all ranks run as many steps, and call step.save, restore and pull together"
_AGAIN = "look at that rank's log; start the job again from its last checkpoint"


@dataclass(frozen=True)
class Termination:
    """The reason why the ranks of a group cannot continue.

    Attributes:
        rank: the rank at fault.
        what: what happened to it, or its action.
        differs: the ranks do not run the same program; otherwise a rank is gone.
        left: it had finished; otherwise it failed or is lost.
    """

    rank: int
    what: str
    differs: bool = False
    left: bool = False

    def error(self, step: int) -> JaxfleetError:
        if self.differs:
            hint = same_leaves_hint("rank") if CHANGED_STATE in self.what else _TOGETHER
            return ProgramError(f"step {step}: {self.what}", hint=hint)
        hint = _AS_MANY if self.left else _AGAIN
        return PeerLostError(f"step {step}: {self.what}", hint=hint)

    def body(self) -> dict[str, Plain]:
        return {
            "rank": self.rank,
            "what": self.what,
            "differs": self.differs,
            "left": self.left,
        }

    @classmethod
    def of(cls, body: object) -> "Termination | None":
        """Reads a termination from a message body; None if it contains none."""
        if not isinstance(body, Mapping):
            return None
        rank = body.get("rank")
        found = rank if isinstance(rank, int) else 0
        differs, left = body.get("differs") is True, body.get("left") is True
        return cls(found, str(body.get("what", "")), differs, left)
