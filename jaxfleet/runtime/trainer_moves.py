"""A trainer whose job moves to other servers: some are added, or the last ones are removed.

The members of the job are then asked to move (`Membership.move`), do one more step with the servers
that they have, and move before the next one, all of them at the same step. The state travels as a
checkpoint, which the new servers read with their own slices and buckets.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxfleet.errors import CheckpointError
from jaxfleet.observability.notices import alert
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.membership import Membership, MembershipChangedError, ServerMove
from jaxfleet.runtime.pserver_checkpoint import restore_job, save_job
from jaxfleet.runtime.step_state import Handle
from jaxfleet.runtime.trainer_checkpoints import TrainerCheckpoints
from jaxfleet.runtime.training_step import State

_AGAIN_STEPS = 100  # after a state that could not be saved


class TrainerMoves(TrainerCheckpoints[State]):
    """What a `TrainerStep` does when the servers of its job change."""

    def _at_its_servers(self, leaves: list[Any]) -> list[Any]:
        """Returns a state for the next step, before which the job may move to other servers.

        Raises:
            PeerLostError: a server or another trainer was lost meanwhile.
        """
        before = self._newest.leaves
        if not before or self._due() is None:
            return leaves
        self._through_changes(self._move_if_due)
        after = self._newest.leaves
        if len(leaves) != len(before):
            return leaves  # not a state of this step, which rejects it
        return [now if leaf is old else leaf
                for leaf, old, now in zip(leaves, before, after, strict=True)]  # fmt: skip

    def _due(self) -> ServerMove | None:
        """Returns the move to make before the next step, if any.

        A change of the members interrupts a step, which is done again first: then all of them are
        between the same two steps.
        """
        client = self.client
        return client.me.membership.move if client.step > self._epoch_step else None

    def _move_if_due(self) -> None:
        move, old = self._due(), self.client
        if move is None:
            return  # the members have changed again, and do a step first
        path = Path(move.folder) / f"epoch-{old.me.membership.epoch}"
        try:
            save_job(old, self._served, path, self._newest.leaves, None)
        except CheckpointError as error:
            self._epoch_step = old.step + _AGAIN_STEPS
            alert(f"{old.me.name} does not move to other servers for {_AGAIN_STEPS} steps: {error}")
            return
        self._move_to(move, path, old)

    def _move_to(self, move: ServerMove, path: Path, old: Client) -> None:
        """Goes on with other servers, which take the state of a checkpoint."""
        count = len(move.servers)
        if old.me.trainer == 0:
            alert(f"the job has {count} server{'s' * (count != 1)} from step {old.step + 1} on")
        old.doing(f"moving to {count} servers")
        old.move_away()
        assert self._scaling is not None
        self._scaling.move_to(move.servers)
        client, restored = self._loaded(old.me.membership.moved(), path, old)
        self._lines.replace(client, self._pace)
        self._epoch_step = client.step
        # Those that it has stay what the script has; other servers may hold other leaves.
        self._newest.leaves = [
            leaf if isinstance(leaf, Handle) == isinstance(new, Handle) else new
            for leaf, new in zip(self._newest.leaves, restored, strict=True)
        ]

    def _loaded(self, members: Membership, path: Path, old: Client) -> tuple[Client, list[Any]]:
        """Loads the state into other servers; returns their client, and the leaves.

        If a trainer is lost before they have it, the others take their places and load it again.
        """
        while True:
            try:
                return self._load(members, path, old)
            except MembershipChangedError as change:
                if change.membership is None:
                    raise
                members = change.membership

    def _load(self, members: Membership, path: Path, old: Client) -> tuple[Client, list[Any]]:
        scaling, session = self._scaling, old.me.session
        assert scaling is not None
        number, count = members.number_of(session), len(members.sessions)
        if number is None:
            self._end(members, old)
        assert number is not None
        self._take_programs(scaling.programs(number, count), count)
        client = self._prepared(scaling.connect(self._job, members, session))
        client.me = replace(client.me, has_moved=True)
        try:
            client.open()
            restored, _ = restore_job(client, self._served, path)
        except BaseException:
            client.abandon()
            raise
        return client, restored
