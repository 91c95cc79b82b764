"""Checkpoints that a step writes by itself, at intervals that the launch requests."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxfleet.checkpoint import CheckpointSeries
from jaxfleet.env import PeriodicSaves
from jaxfleet.errors import CheckpointError, StrategyError
from jaxfleet.observability.notices import alert, notify

# With an interval in seconds, the processes agree at these steps whether the time has come: only
# the first one's clock counts. A round trip takes 1 ms; numbers that depend on nothing but the step
# are the same for a process that came back in the middle.
_AGREE_EVERY = 4


_reserved: set[Path] = set()  # the folders of this process's steps


def reserve_folder(saves: PeriodicSaves, name: str) -> None:
    """Reserves the folder of a step's checkpoints for that step, for the life of this process.

    Raises:
        StrategyError: another step of that name has it.
    """
    folder = saves.folder.absolute() / name
    if folder in _reserved:
        what = f"two steps are named '{name}', and periodic checkpoints of both are in {folder}"
        hint = "jf.distribute(..., name=...) gives each a name; one would remove the other's"
        raise StrategyError(what, hint=hint)
    _reserved.add(folder)


class PeriodicSaver:
    """Saves the state of a whole job, at the same steps on all of its processes.

    A save that fails, for example for lack of space, is reported, and the training goes on: the
    checkpoints before it stay.

    Args:
        saves: where, how often and how many.
        name: of the step, which has a folder of its own.
        save: writes a checkpoint of a state after a number of steps; collective.
        agree: returns the number that the first process passes, on all, or raises its error on all;
            collective.
        is_first: whether this process is the first.
        clock: in seconds.

    Attributes:
        done: the number of steps that led to the newest state.
        count: the number of checkpoints written.
    """

    def __init__(
        self,
        saves: PeriodicSaves,
        name: str,
        *,
        save: Callable[[Path, Any, int], None],
        agree: Callable[[str, int, Exception | None], int],
        is_first: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = saves.every
        self._series = CheckpointSeries(saves.folder / name, keep=saves.keep)
        self._save, self._agree, self._is_first, self._clock = save, agree, is_first, clock
        self._saved_at = clock()
        self.done = self.count = 0

    def after_step(self, state: Any, done: int | None = None) -> None:
        """Saves the state that a step returned if that is due.

        Args:
            state: the state.
            done: the number of steps so far; one more than before by default.
        """
        self.done = self.done + 1 if done is None else done
        if self._is_due():
            self._write(state)

    def newest(self) -> tuple[Path, int] | None:
        """Returns the last good checkpoint and its step, the same on all processes; collective.

        None if there is none, or steps have run since this process began or restored one.

        Raises:
            CheckpointError: the first process cannot read the folder.
        """
        if self.done:
            return None
        number, error = 0, None
        if self._is_first():
            try:
                step = self._series.latest(warn=alert)
                number = 0 if step is None else step + 1
            except OSError as found:  # the others wait for an answer, so it is passed on
                what = f"the periodic checkpoints in {self._series.root} cannot be read: {found}"
                error = CheckpointError(what, hint="let this process read the folder (--save-to)")
        number = self._agree("find the last periodic checkpoint", number, error)
        return (self._series.path(number - 1), number - 1) if number else None

    def resume(self, done: int) -> None:
        """Continues after a number of steps, of a checkpoint or of a job that goes on."""
        self.done = done

    def _is_due(self) -> bool:
        if self._every.steps is not None:
            return self.done % self._every.steps == 0
        assert self._every.seconds is not None
        if self.done % _AGREE_EVERY:
            return False
        is_time = self._clock() - self._saved_at >= self._every.seconds
        return bool(self._agree("decide on a periodic checkpoint", int(is_time), None))

    def _write(self, state: Any) -> None:
        began, done = self._clock(), self.done
        try:
            self._save(self._series.path(done), state, done)
        except (CheckpointError, OSError) as error:
            if self._is_first():
                what = f"the periodic checkpoint after step {done} failed: {error}"
                alert(f"{what}; the training goes on, and those before it stay")
        else:
            self.count += 1
            if self._is_first():
                took_s = self._clock() - began
                notify(
                    f"checkpoint {self.count} of the job, after step {done}, took {took_s:.1f} s"
                )
                self._remove_others(done)
        finally:
            self._saved_at = self._clock()

    def _remove_others(self, done: int) -> None:
        """Removes what the checkpoint after step `done` replaces."""
        root = self._series.root
        try:
            # Those of later steps are of a run that did not go on from them.
            self._series.remove_after(done)
        except OSError as error:
            # Nothing is pruned: the last ones, which would stay, are those of the earlier run.
            what = f"{root} has checkpoints of an earlier run that cannot be removed: {error}"
            alert(f"{what}; remove those after step {done}, or resume goes on from them")
            return
        try:
            self._series.prune()
        except OSError as error:
            what = f"old checkpoints in {root} cannot be removed: {error}"
            alert(f"{what}; that after step {done} is good, and the next one tries again")
