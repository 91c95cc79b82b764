"""A rank's view of its group: the ranks' latest reports, and the reason why the group ended."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from jaxfleet.errors import JaxfleetError, PeerLostError, ProgramError
from jaxfleet.observability import printable
from jaxfleet.transport.consistency import same_leaves_hint
from jaxfleet.transport.messages import Message, Plain

_TOGETHER = (
    "run the same script, with the same arguments and data of the same shapes, on each rank; "
    "step.save, step.restore and step.pull are called by every rank, too"
)
CHANGED_STATE = "the state that was changed"  # the place where ranks compare their changes of it
_AS_MANY = "let all ranks run as many steps, and call step.save, restore and pull together"
_AGAIN = "look at that rank's log; start the job again from its last checkpoint"


@dataclass(frozen=True)
class Termination:
    """The reason why the ranks of a group cannot continue."""

    rank: int  # the rank at fault
    what: str  # what happened to it, or its action
    differs: bool = False  # the ranks do not run the same program; otherwise a rank is gone
    left: bool = False  # it had finished; otherwise it failed or is lost

    def error(self, step: int) -> JaxfleetError:
        if self.differs:
            hint = same_leaves_hint("rank") if CHANGED_STATE in self.what else _TOGETHER
            return ProgramError(f"step {step}: {self.what}", hint=hint)
        hint = _AS_MANY if self.left else _AGAIN
        return PeerLostError(f"step {step}: {self.what}", hint=hint)

    def body(self) -> dict[str, Plain]:
        return {"rank": self.rank, "what": self.what, "differs": self.differs, "left": self.left}

    @classmethod
    def of(cls, body: object) -> "Termination | None":
        """Reads a termination from a message body; None if it contains none."""
        if not isinstance(body, Mapping):
            return None
        rank = body.get("rank")
        found = rank if isinstance(rank, int) else 0
        differs, left = body.get("differs") is True, body.get("left") is True
        return cls(found, str(body.get("what", "")), differs, left)


_SHOWN = 4  # ranks, in the log


class GroupView:
    """State reported by rank 0. Two threads update it: one waits for answers, the other beats."""

    def __init__(self) -> None:
        self.verdict: Termination | None = None
        self._ranks: dict[int, tuple[int, str]] = {}  # step and activity of each
        self._silent_s = 0.0
        self._lock = threading.Lock()

    def hear(self, message: Message) -> None:
        ranks = message.body.get("ranks")
        with self._lock:
            self._silent_s = 0.0
            for each in ranks if isinstance(ranks, list) else ():
                if isinstance(each, dict):
                    at = int(str(each["step"])), printable(str(each["doing"]))
                    self._ranks[int(str(each["rank"]))] = at
            if (verdict := Termination.of(message.body.get("verdict"))) is not None:
                self._end_by(verdict)

    def miss(self, seconds: float, *, lost_after_s: float) -> None:
        """Counts silence of rank 0, which is lost after `lost_after_s`."""
        with self._lock:
            self._silent_s += seconds
            if self._silent_s > lost_after_s:
                what = f"rank 0 is lost: silent for {self._silent_s:.1f} s"
                step, doing = self._ranks.get(0, (0, "nothing"))
                self._end_by(Termination(0, f"{what}; its last report: step {step}, {doing}"))

    def late(self, rank: int, what: str, waited: str) -> Termination:
        """Returns the verdict on the ranks that are late, or the verdict that came before.

        A rank at the same place, `what`, is not late.
        """
        with self._lock:
            others = {r: each for r, each in self._ranks.items() if r != rank}
            behind = min(others, key=lambda r: (others[r][0], others[r][1] == what), default=0)
            at, doing = others.get(behind, (0, "nothing"))
            said = f"rank {behind} is late: {waited}; its last report: step {at}, {doing}"
            return self._end_by(Termination(behind, said))

    def elsewhere(self, rank: int, step: int, what: str) -> str:
        """Describes the ranks that are elsewhere, and their activity; empty if there are none."""
        with self._lock:
            away = {r: at for r, at in self._ranks.items() if r != rank and at != (step, what)}
        shown = [f"rank {r}: step {at}, {doing}" for r, (at, doing) in sorted(away.items())]
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        return ", ".join(shown[:_SHOWN]) + more

    def _end_by(self, verdict: Termination) -> Termination:
        self.verdict = self.verdict or verdict
        return self.verdict
