"""State leaves of a parameter-server job: their locations and transfers."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxfleet.capture import Captured
from jaxfleet.ir import Kind, Program, Role, Variable
from jaxfleet.passes.pserver.insert_startup import kept_for_trainers, leaf_pieces, state_exchange
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.pending_request import PendingRequest
from jaxfleet.ps.client.trainer_executor import run_startup, sent_leaves
from jaxfleet.runtime.checkpointing import on_host
from jaxfleet.runtime.pserver_job import JobPrograms
from jaxfleet.runtime.step_state import Handle


class RemoteState:
    """Locates the leaves of a state, and transfers them."""

    def __init__(self, captured: Captured, job: JobPrograms) -> None:
        self.captured = captured
        self._leaves = captured.signature.state
        self._program = captured.program
        self._mine = {v.name for v in job.trainer.of_kind(Kind.PARAM, Kind.STATE)}
        self._job = job
        self._places = leaf_pieces(job.server_startups)
        self._kept = kept_for_trainers(job.server_startups)
        moves = (op for op in job.trainer.root.ops if op.role in {Role.RPC, Role.DIST})
        self._received = {name for op in moves for name in op.writes}
        count = len(job.servers)
        where = "1 server" if count == 1 else f"{count} servers"
        self._asked: list[PendingRequest] = []  # servers' own checkpoints
        self._rewinds = 0  # the client's count at that time
        self._handles = {
            leaf.name: Handle(leaf.name, leaf.shape, leaf.dtype, where)
            for leaf in self._leaves
            if leaf.name not in self._mine
        }

    @property
    def mine(self) -> list[Variable]:
        """The leaves that trainers hold and change themselves."""
        found = [self._program.variables[leaf.name] for leaf in self._leaves]
        params = {v.name for v in self._program.of_kind(Kind.PARAM)}
        served = (params | self._received) - self._kept
        return [v for v in found if v.name in self._mine - served]

    @property
    def params(self) -> list[str]:
        """The leaves that servers hold and trainers receive."""
        mine = {variable.name for variable in self.mine}
        return [leaf.name for leaf in self._leaves if leaf.name in self._mine - mine]

    def held_names(self) -> frozenset[str]:
        """Returns the leaves that trainers have, of whatever kind."""
        return frozenset(leaf.name for leaf in self._leaves if leaf.name in self._mine)

    def held(self, leaves: Sequence[Any]) -> dict[str, Any]:
        pairs = zip(self._leaves, leaves, strict=True)
        return {leaf.name: value for leaf, value in pairs if leaf.name in self._mine}

    def leaves(self, new: Mapping[str, Any]) -> list[Any]:
        """Returns the leaves of a state; handles for those that only servers hold.

        Handles are new at every step, so that those of earlier steps can be recognized.
        """
        return [
            new[leaf.name] if leaf.name in self._mine else self._handles[leaf.name].again()
            for leaf in self._leaves
        ]

    def assign(
        self, client: Client, changed: Sequence[tuple[int, Any]], *, replace: bool
    ) -> dict[int, Any]:
        """Sends leaves to the servers, from trainer 0; returns the trainers' values, by place.

        Collective; every trainer continues with trainer 0's values. The first state is sent by the
        startup program; the leaves of a later one likewise, but by all trainers.
        """
        client.doing("giving the state to servers")
        places = {self._leaves[at].name: at for at, _ in changed}
        program = self._job.trainer_startup
        if replace:
            program = self._exchange(client, gives=places, takes=self._mine & places.keys())
        given = set(sent_leaves(program))
        values = {self._leaves[at].name: value for at, value in changed}
        arrays = {name: on_host(values[name]) for name in values if name in given}
        taken = run_startup(program, client, arrays, replace=replace)
        return {at: taken.get(name, self._handles.get(name)) for name, at in places.items()}

    def pull(self, client: Client, names: Sequence[str]) -> dict[str, Any]:
        return run_startup(self._exchange(client, takes=names), client, {})

    def _exchange(
        self, client: Client, *, gives: Collection[str] = (), takes: Collection[str] = ()
    ) -> Program:
        trainer, me = self._job.trainer, client.me.trainer
        return state_exchange(
            self._program, trainer, self._places, trainer_id=me, gives=gives, takes=takes
        )

    def save_own(self, client: Client, *, is_sync: bool) -> None:
        """Lets servers write checkpoints of their own, so that trainers may drop pushes.

        They are requested while there is room for as many pushes again, and awaited when there is
        none: a server writes while the steps go on.
        """
        if self._rewinds != client.rewinds:  # the requests belong to steps that were rolled back
            self._asked, self._rewinds = [], client.rewinds
        if client.replay.is_half_full and not self._asked:
            self._asked = client.ask_to_save(sends_every_step=is_sync)
        if client.replay.is_full:
            client.doing("checkpoint")
            client.wait(self._asked)
        if self._asked and all(request.is_done for request in self._asked):
            asked, self._asked = self._asked, []
            for request in asked:
                if request.answer is not None and request.answer.body.get("is_full"):
                    client.replay.put_off_saving()
                else:
                    client.replay.forget_saved(request.server, request.message.step)

    def own(self, leaves: Sequence[Any]) -> dict[str, np.ndarray]:
        """Returns the leaves that only trainers hold, on the host."""
        pairs = zip(self._leaves, leaves, strict=True)
        return {leaf.name: on_host(value) for leaf, value in pairs if leaf.name in self._kept}
