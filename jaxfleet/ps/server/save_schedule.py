"""When a server writes a checkpoint of its own: before the replay of what came after takes long."""

from collections.abc import Callable
from dataclasses import dataclass

_REPLAY_S = 1.0  # of steps that a server that starts again is sent anew: half of what is promised
_STEP_S = 0.01  # what a step costs there beside its blocks: messages, and waiting for one another
_EVERY_S = 30.0
_MOST_REPLAY_S = 1.5  # from which on saves may cost more, so that replay stays below 2 s
_SHARE = 20  # times as long as the last save took: a twentieth of the time goes to saves
_SHARE_THEN = 4  # the same where replay would take too long, as of a state of 100 MB and more
_AGAIN_S, _MOST_AGAIN_S = 5.0, 60.0  # after one that failed


@dataclass
class SaveSchedule:
    """Knows what was saved when, and how long it took.

    Attributes:
        clock: tells the time in seconds.
    """

    clock: Callable[[], float]
    _number: int = -1
    _block_s: float = 0.0  # spent in blocks by then
    _saved_at: float = 0.0
    _took_s: float = 0.0
    _retry_at: float = 0.0
    _again_s: float = _AGAIN_S

    def is_due(self, number: int, block_s: float) -> bool:
        """Returns whether to save.

        Args:
            number: of steps that are applied; of all trainers, where they do not wait.
            block_s: the seconds that the server has spent in blocks.
        """
        now, steps = self.clock(), number - self._number
        replay_s = steps * _STEP_S + block_s - self._block_s
        share = _SHARE if replay_s < _MOST_REPLAY_S else _SHARE_THEN
        if steps <= 0 or now < self._retry_at or now - self._saved_at < share * self._took_s:
            return False
        return replay_s >= _REPLAY_S or now - self._saved_at >= _EVERY_S

    @property
    def is_waiting(self) -> bool:
        """Whether one failed, and it is too early to try again."""
        return self.clock() < self._retry_at

    def saved(self, number: int, block_s: float, took_s: float) -> None:
        """Notes a save, or with which a server begins."""
        self._number, self._block_s, self._took_s = number, block_s, took_s
        self._saved_at, self._retry_at, self._again_s = self.clock(), 0.0, _AGAIN_S

    def failed(self) -> float:
        """Notes one that failed; returns in how many seconds to try again."""
        again_s = self._again_s
        self._retry_at = self.clock() + again_s
        self._again_s = min(2 * again_s, _MOST_AGAIN_S)
        return again_s
