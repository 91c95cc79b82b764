"""Checkpoints of one run: a folder per step, of which the last few are kept."""

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxfleet.checkpoint.files import DAMAGED, MANIFEST, TEMPORARY, entries, remove, sync, unique
from jaxfleet.checkpoint.reading import Checkpoint, open_checkpoint
from jaxfleet.errors import CheckpointError

_STEP = re.compile(r"step-(\d{8,18})")


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


@dataclass(frozen=True)
class CheckpointSeries:
    """Checkpoints under `root`, numbered by step.

    Attributes:
        root: the parent folder, created by the first save.
        keep: how many checkpoints `prune` keeps.

    Examples:
        >>> from pathlib import Path
        >>> import numpy as np
        >>> from jaxfleet.checkpoint import CheckpointSeries, save_arrays
        >>> series = CheckpointSeries(Path("run"), keep=2)
        >>> for step in (100, 200, 300):
        ...     save_arrays(series.path(step), {"w": np.ones(2)}, step=step)
        >>> series.prune()
        >>> series.steps(), series.latest()
        ((200, 300), 300)
    """

    root: Path
    keep: int = 2

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise CheckpointError(f"a series that keeps {self.keep} checkpoints", hint="keep=1")

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def steps(self) -> tuple[int, ...]:
        """Returns the committed steps in order, including damaged checkpoints."""
        return tuple(step for step in self._folders() if (self.path(step) / MANIFEST).is_file())

    def chain(self, step: int) -> tuple[Checkpoint, ...]:
        """Returns the checkpoint of a step, followed by its bases.

        Raises:
            CheckpointError: one is missing or damaged, or differs from the recorded base.
        """
        found = [open_checkpoint(self.path(step))]
        while (link := found[-1].after) is not None:
            path = self.path(link.step)
            if (
                link.step >= found[-1].step
                or (older := open_checkpoint(path)).sha256 != link.sha256
            ):
                what = f"{path} is not the checkpoint whose changes {found[-1].folder} holds"
                raise CheckpointError(what, hint=DAMAGED)
            found.append(older)
        return tuple(found)

    def latest(self, *, warn: Callable[[str], None] = _warn) -> int | None:
        """Returns the last step whose checkpoint and bases are good, read to the last byte.

        Args:
            warn: called with each damaged checkpoint and its error.

        Returns:
            The step, or None if there is none.
        """
        for step in reversed(self.steps()):
            try:
                for checkpoint in self.chain(step):
                    checkpoint.verify()
            except CheckpointError as error:
                warn(f"the checkpoint of step {step} is passed over: {error}")
            else:
                return step
        return None

    def prune(self) -> None:
        """Removes leftovers of broken saves, and all but the last `keep` good checkpoints.

        The bases of kept checkpoints stay too, and so does an uncommitted folder newer than the
        last good checkpoint: it may still be in writing.
        """
        chains = {step: chain for step in self.steps() if (chain := self._opens(step))}
        good = list(chains)[-self.keep :]
        needed = {older.step for step in good for older in chains[step]}
        for name in entries(self.root):
            if name.startswith(TEMPORARY):
                remove(self.root / name)
        for step in self._folders():
            committed = (self.path(step) / MANIFEST).is_file()
            old = good and (step < good[0] or (step < good[-1] and not committed))
            if old and step not in needed:
                self._remove(step)

    def remove_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, when the run resumes from this one.

        They do not come back if the machine loses power.
        """
        void = [later for later in self._folders() if later > step]
        for later in void:
            self._remove(later)
        if void:
            sync(self.root)

    def _remove(self, step: int) -> None:
        """Removes a checkpoint atomically: a reader never sees half of it."""
        aside = self.root / unique(f"{TEMPORARY}{self.path(step).name}")
        try:
            self.path(step).rename(aside)
        except FileNotFoundError:
            return
        remove(aside)

    def _folders(self) -> list[int]:
        found = (_STEP.fullmatch(name) for name in entries(self.root))
        return sorted(int(match[1]) for match in found if match)

    def _opens(self, step: int) -> tuple[Checkpoint, ...]:
        try:
            return self.chain(step)
        except CheckpointError:
            return ()
