"""Verdict: what ended a group, in words that are the same on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxfleet.errors import JaxfleetError, PeerLostError, ProgramError
from jaxfleet.ps.hints import same_leaves_hint
from jaxfleet.ps.messages import Plain

_TOGETHER = (
    "run the same script, with the same arguments and data of the same shapes, on each rank; "
    "step.save, step.restore and step.pull are called by every rank, too"
)
CHANGED_STATE = "the state that was changed"  # the place where ranks compare what they put in it
_AS_MANY = "let all ranks run as many steps, and call step.save, restore and pull together"
_AGAIN = "look at that rank's log; start the job again from its last checkpoint"


@dataclass(frozen=True)
class Verdict:
    """Says why the ranks of a group cannot go on.

    Attributes:
        rank: whom it is about.
        what: what happened to it, or what it did.
        differs: the ranks do not run the same; else one of them is gone.
        left: it had come to its end; else it failed, or is lost.
    """

    rank: int
    what: str
    differs: bool = False
    left: bool = False

    def error(self, step: int) -> JaxfleetError:
        """Returns what a rank raises that is at a step."""
        if self.differs:
            hint = same_leaves_hint("rank") if CHANGED_STATE in self.what else _TOGETHER
            return ProgramError(f"step {step}: {self.what}", hint=hint)
        hint = _AS_MANY if self.left else _AGAIN
        return PeerLostError(f"step {step}: {self.what}", hint=hint)

    def body(self) -> dict[str, Plain]:
        """Returns it as a message carries it."""
        return {
            "rank": self.rank,
            "what": self.what,
            "differs": self.differs,
            "left": self.left,
        }

    @classmethod
    def of(cls, body: object) -> "Verdict | None":
        """Reads what a message says of one; None where it says none."""
        if not isinstance(body, Mapping):
            return None
        rank = body.get("rank")
        found = rank if isinstance(rank, int) else 0
        differs, left = body.get("differs") is True, body.get("left") is True
        return cls(found, str(body.get("what", "")), differs, left)
