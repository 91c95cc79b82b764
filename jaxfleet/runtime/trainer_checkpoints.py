"""Checkpoints of a trainer's step: saving, restoring, and returning to a job that goes on."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic

import jax

from jaxfleet.capture import Captured
from jaxfleet.env import PeriodicSaves
from jaxfleet.errors import FeedError, StrategyError
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.former_process import FormerProcess
from jaxfleet.runtime.own_state import OwnStateKeeper
from jaxfleet.runtime.periodic_saves import PeriodicSaver
from jaxfleet.runtime.pserver_checkpoint import agree, meet, restore_job, save_job
from jaxfleet.runtime.remote_state import RemoteState
from jaxfleet.runtime.step_state import NewestState
from jaxfleet.runtime.trainer_connection import TrainerConnection, TrainerSync
from jaxfleet.runtime.trainer_membership import ChangingTrainer
from jaxfleet.runtime.training_step import State
from jaxfleet.strategy import DistributedStrategy


class TrainerCheckpoints(ChangingTrainer, Generic[State]):
    """What a `TrainerStep` does with checkpoints, and with the state of a process before it.

    Attributes:
        captured: the one-device program.
        strategy: how it is distributed.
    """

    captured: Captured
    strategy: DistributedStrategy
    _pace: TrainerSync
    _lines: TrainerConnection
    _served: RemoteState
    _newest: NewestState
    _saver: PeriodicSaver | None
    _keeper: OwnStateKeeper
    _compares: bool

    @property
    @abstractmethod
    def client(self) -> Client: ...

    @abstractmethod
    def _given(self, leaves: list[Any], tree: Any) -> list[Any]: ...

    def save_periodically(self, saves: PeriodicSaves) -> None:
        """Lets the following steps write checkpoints by themselves.

        Raises:
            StrategyError: the interval is in seconds, and trainers do not wait for each other.
        """
        if not self._pace.is_sync and saves.every.seconds is not None:
            what = (
                f"checkpoints every {saves.every}, and with communication "
                f"'{self.strategy.communication}' no step is that of all trainers"
            )
            raise StrategyError(what, hint="count steps of each trainer: --save-every 500steps")
        self._saver = PeriodicSaver(
            saves,
            self.captured.program.name,
            save=lambda path, state, _: self.save(path, state),
            agree=lambda what, number, error: self._through_changes(
                lambda: agree(self.client, what, error, number)
            ),
            is_first=lambda: self._is_first,
        )

    def resume(self, state: State) -> tuple[State, int]:
        """Returns the state to go on from, and the number of steps that it includes.

        A process that takes a lost trainer's place (`on_trainer_lost="wait"`) receives the state
        before the step that was being computed; in `fl`, that of the last exchange before the one
        that was under way; in the other relaxed modes, the newest state, and the number of steps
        after which servers may lack some of the former process's gradients. In a
        job that begins, all trainers receive that of its last periodic checkpoint (`jaxfleet launch
        --save-every`), if there is one. Any other process has its own state back, which is of no
        step, or of a checkpoint that it has restored.

        Args:
            state: the initial one, as for the first step.

        Raises:
            FeedError: it does not match the example.
            PeerLostError: a server is gone or late, or has lost part of the state.
            CheckpointError: the last periodic checkpoint is of another step.
        """
        leaves, tree = jax.tree_util.tree_flatten(state)
        client = self.client
        if self._newest.is_made_of(leaves):
            return state, self._pace.steps_of(client)
        if self._joined is not None:
            self._newest.check(leaves, tree)
            self._newest.leaves = self._take_joined()
            if self._saver is not None:
                self._saver.resume(client.step)
            joined: State = jax.tree_util.tree_unflatten(tree, self._newest.leaves)
            return joined, client.step
        former = client.former
        if self._newest.leaves:
            return state, 0
        self._newest.check(leaves, tree)
        if former is not None and former.has_begun:
            resumed, done = self._resumed(former), self._pace.steps_of(client)
            if self._saver is not None:
                self._saver.resume(done)
            return resumed, done
        saver = self._saver
        if saver is None or (found := saver.newest()) is None:
            return state, 0
        path, done = found
        restored = self.restore(path)
        saver.resume(done)
        return restored, done

    def _resumed(self, former: FormerProcess) -> State:
        client, served = self.client, self._served
        client.resume(former.done)
        client.doing(f"returning to step {former.seen}")
        values = {**served.pull(client, served.params), **self._keeper.recall(client)}
        leaves = self._newest.leaves = served.leaves(values)
        self._pace.restart(served.held(leaves), client.clock, self._keeper.trained)
        self._compares = self._compares and former.done == former.base
        tree = self.captured.signature.state_tree
        state: State = jax.tree_util.tree_unflatten(tree, leaves)
        return state

    def save(
        self, path: str | Path, state: State, *, data: Mapping[str, int] | None = None
    ) -> None:
        """Writes a checkpoint, which a step in any mode restores; collective.

        Every server writes its part, trainer 0 the rest and finally the manifest.

        Args:
            path: a folder that all processes of the job can access. An existing checkpoint is
                replaced once the new one is complete.
            state: the result of the last step; values of any other are sent to the servers first.
            data: the position of a data loader to save with it; trainer 0's is.

        Raises:
            CheckpointError: it cannot be written; the previous checkpoint stays.
            FeedError: it does not match the example, or has handles of an earlier step.
        """
        leaves, tree = jax.tree_util.tree_flatten(state)
        self._through_changes(lambda: self._save(Path(path).absolute(), leaves, tree, data))

    def _save(
        self, path: Path, leaves: list[Any], tree: Any, data: Mapping[str, int] | None
    ) -> None:
        if not self._newest.is_made_of(leaves):
            leaves = self._newest.leaves = self._given(leaves, tree)
        self._pace.flush()
        trained = self._pace.steps_of(self.client) if self._pace.counts_exchanges else None
        save_job(self.client, self._served, path, leaves, data, trained=trained)

    def restore(self, path: str | Path) -> State:
        """Returns the state of a checkpoint, written in any mode; collective.

        Args:
            path: a folder that all processes of the job can access.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged or of another step.
        """
        leaves = self._through_changes(lambda: self._restored(path))
        tree = self.captured.signature.state_tree
        restored: State = jax.tree_util.tree_unflatten(tree, leaves)
        return restored

    def _restored(self, path: str | Path) -> list[Any]:
        client = self.client
        self._refuse_if_returned("restores a checkpoint")
        self._pace.flush()
        # No push of any trainer may arrive after the restored state, and none of the values that a
        # slower trainer still waits for may be replaced.
        meet(client, f"restore {path}", rewinds=True)
        leaves, trained = restore_job(client, self._served, path)
        self._newest.leaves = leaves
        self._keeper.keep(client, leaves, trained)
        self._pace.restart(self._served.held(leaves), trained=trained)
        if self._saver is not None:
            self._saver.resume(self._pace.steps_of(client))
        return leaves

    def _refuse_if_returned(self, what: str) -> None:
        """Rejects what only trainers of a new job may do, in one that returns to its job."""
        if self._joined is not None:
            joined_after = self.client.step
            self._step_back()
            raise FeedError(
                f"this process joins a job after step {joined_after}, and {what}",
                hint="begin with `state, done = step.resume(state)`, and go on with batches[done:]",
            )
        former = self.client.former
        if former is not None and former.has_begun and not self._newest.leaves:
            raise FeedError(
                f"trainer {self.client.me.trainer} returns to a job at step {former.seen}, and "
                f"{what}",
                hint="begin with `state, done = step.resume(state)`, and go on with batches[done:]",
            )

    def _refuse_another_state(self) -> None:
        """Rejects a new state if servers continue from checkpoints of an earlier run."""
        self._refuse_if_returned("begins with a state of its own")
        if self.client.former is not None:
            return  # the job is before its second step, and has begun with this state
        trainer, found = self.client.me.trainer, self._lines.found
        if found > 0 or (found == 0 and trainer == 0):
            what = (
                f"trainer {trainer} begins with a state of its own, and the servers go on from "
                f"their checkpoints of step {found}"
            )
            hint = "launch with another --job or --checkpoint-dir; or begin with step.restore(path)"
            if self.client.me.life > 0:
                hint = (
                    "it was restarted, and a trainer comes back only to a job with "
                    "strategy.on_trainer_lost='wait'; --max-restarts starts the whole job again"
                )
            raise FeedError(what, hint=hint)

    @property
    def _is_first(self) -> bool:
        return self.client.me.trainer == 0
