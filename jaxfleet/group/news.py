"""What a rank has heard of all ranks, from rank 0, and for how long it has heard nothing."""

import threading

from jaxfleet.group.verdict import Verdict
from jaxfleet.ps.messages import Message

_SHOWN = 4  # ranks, in the log


class News:
    """What rank 0 has said. Two threads hear it: one waits for answers, the other beats.

    Attributes:
        verdict: why the group cannot go on, once it cannot; the first one counts.
    """

    def __init__(self) -> None:
        self.verdict: Verdict | None = None
        self._ranks: dict[int, tuple[int, str]] = {}  # in which step each is, and what it does
        self._silent_s = 0.0
        self._lock = threading.Lock()

    def hear(self, message: Message) -> None:
        """Takes in what rank 0 says of all."""
        ranks = message.body.get("ranks")
        with self._lock:
            self._silent_s = 0.0
            for each in ranks if isinstance(ranks, list) else ():
                if isinstance(each, dict):
                    at = int(str(each["step"])), str(each["doing"])
                    self._ranks[int(str(each["rank"]))] = at
            if (verdict := Verdict.of(message.body.get("verdict"))) is not None:
                self._end_by(verdict)

    def miss(self, seconds: float, *, lost_after_s: float) -> None:
        """Counts time in which nothing was heard of rank 0, which is lost after so much of it."""
        with self._lock:
            self._silent_s += seconds
            if self._silent_s > lost_after_s:
                what = f"rank 0 is lost: not heard of for {self._silent_s:.1f} s"
                step, doing = self._ranks.get(0, (0, "nothing"))
                self._end_by(Verdict(0, f"{what}; it last said: step {step}, {doing}"))

    def late(self, rank: int, what: str, waited: str) -> Verdict:
        """Returns the verdict on whom a rank has waited for in vain, or the one that came before.

        Args:
            rank: who waited.
            what: for what: of those in one step, it is not who waits for it too.
            waited: the same, in words.
        """
        with self._lock:
            others = {r: each for r, each in self._ranks.items() if r != rank}
            behind = min(others, key=lambda r: (others[r][0], others[r][1] == what), default=0)
            at, doing = others.get(behind, (0, "nothing"))
            said = f"rank {behind} is late: {waited}; it said: step {at}, {doing}"
            return self._end_by(Verdict(behind, said))

    def elsewhere(self, rank: int, step: int, what: str) -> str:
        """Returns the ranks that are not where a rank is, and what they do; empty where all are."""
        with self._lock:
            away = {r: at for r, at in self._ranks.items() if r != rank and at != (step, what)}
        shown = [f"rank {r}: step {at}, {doing}" for r, (at, doing) in sorted(away.items())]
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        return ", ".join(shown[:_SHOWN]) + more

    def _end_by(self, verdict: Verdict) -> Verdict:
        self.verdict = self.verdict or verdict
        return self.verdict
