"""Checkpoints of a step without servers: saving, restoring and resuming its state."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic

import jax
import numpy as np

from jaxfleet.capture import Captured
from jaxfleet.checkpoint import Checkpoint
from jaxfleet.data import Batches, Loader
from jaxfleet.env import PeriodicSaves
from jaxfleet.runtime.checkpointing import open_for, read_leaves, read_tables, save_leaves
from jaxfleet.runtime.periodic_saves import PeriodicSaver
from jaxfleet.runtime.scalar_metrics import ScalarMetrics
from jaxfleet.runtime.step_inputs import check_state
from jaxfleet.runtime.step_state import AuxiliaryState, LastState
from jaxfleet.runtime.training_step import State
from jaxfleet.tables.access import LocalTables


class CheckpointMethods(ABC, Generic[State]):
    """What a `Step` does with checkpoints, its own and those of other modes.

    Attributes:
        captured: the one-device program.
        tables: the tables that it looks up, which are saved too.
    """

    captured: Captured
    tables: LocalTables
    _held: AuxiliaryState | None
    _scalars: ScalarMetrics
    _saver: PeriodicSaver | None
    _restored: LastState
    _restored_steps: int

    @abstractmethod
    def pull(self, state: State) -> State: ...

    @abstractmethod
    def place(self, state: State) -> State: ...

    @property
    @abstractmethod
    def _speaks(self) -> bool: ...

    def save_periodically(self, saves: PeriodicSaves) -> None:
        """Lets the following steps write checkpoints by themselves."""
        self._saver = PeriodicSaver(
            saves,
            self.captured.program.name,
            save=lambda path, state, done: self.save(path, state, number=done),
            agree=self._agreed_number,
            is_first=lambda: self._is_first,
        )

    def _agreed_number(self, _: str, number: int, error: Exception | None) -> int:
        """Returns the number that the first process passes, or raises its error.

        `_` names the number to the others.
        """
        if error is not None:
            raise error
        return number

    def save(
        self,
        path: str | Path,
        state: State,
        *,
        number: int = 0,
        data: Mapping[str, int] | None = None,
    ) -> None:
        """Writes a checkpoint, which a step in any mode restores.

        Args:
            path: a folder; an existing checkpoint is replaced once the new one is complete.
            state: the state to save.
            number: number of steps that led to it, recorded in the checkpoint.
            data: the position of a data loader to save with it: `batches.state()`.

        Raises:
            CheckpointError: it cannot be written.
        """
        leaves, tree = jax.tree_util.tree_flatten(self.pull(state))
        check_state(leaves, tree, self.captured)
        self._write(path, leaves, self._extra(), number, data)

    def restore(self, path: str | Path) -> State:
        """Returns the state of a checkpoint, written in any mode.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged or of another step.
        """
        variables = [self.captured.program.variables[x.name] for x in self.captured.signature.state]
        checkpoint = self._opened(path)
        self._scalars.step = max(self._scalars.step, checkpoint.step)
        if self._saver is not None:
            self._saver.resume(checkpoint.step)
        read = read_leaves(checkpoint, variables)
        if self.tables.stores:
            read_tables(checkpoint, self.tables)
        tree, leaves = self.captured.signature.state_tree, [read[v.name] for v in variables]
        if self._held is not None:
            found: State = jax.tree_util.tree_unflatten(
                tree, self._held.restored(leaves, tree, checkpoint)
            )
        else:
            found = self.place(jax.tree_util.tree_unflatten(tree, leaves))
        self._restored = LastState(jax.tree_util.tree_leaves(found))
        self._restored_steps = checkpoint.step
        return found

    def resume(self, state: State) -> tuple[State, int]:
        """Returns the state to go on from, and the number of steps that it includes.

        It is that of the job's last periodic checkpoint (`jaxfleet launch --save-every`), if there
        is one and no step has run. Otherwise it is the state that is passed: of no step, or of a
        checkpoint that this step has restored. No process of this mode takes a lost one's place.

        Raises:
            CheckpointError: the last periodic checkpoint is of another step.
        """
        if self._restored.is_made_of(jax.tree_util.tree_leaves(state)):
            return state, self._restored_steps
        found = self._saver.newest() if self._saver is not None else None
        if found is None:
            return state, 0
        path, done = found
        return self.restore(path), done

    def batches(self, loader: Loader, done: int = 0) -> Batches:
        """Returns the batches of a loader after `done` steps, as `TrainingStep.batches`."""
        return loader.from_step(done)

    def _extra(self) -> Mapping[str, np.ndarray]:
        """Returns the values that are saved beside the user's leaves."""
        return {} if self._held is None else self._held.to_save()

    def _write(
        self,
        path: str | Path,
        leaves: list[Any],
        extra: Mapping[str, np.ndarray],
        number: int,
        data: Mapping[str, int] | None,
    ) -> None:
        save_leaves(
            path, self.captured, leaves, step=number, tables=self.tables, extra=extra, data=data
        )

    def _opened(self, path: str | Path) -> Checkpoint:
        return open_for(path, self.captured)

    @property
    def _is_first(self) -> bool:
        return self._speaks
