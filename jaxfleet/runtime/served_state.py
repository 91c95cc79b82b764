"""The leaves of a state in a parameter-server job: which are where, and how they travel."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxfleet.capture import Captured
from jaxfleet.ir import Kind, Program, Role, Variable
from jaxfleet.passes._startup import exchange_of, kept_for_trainers, places_of
from jaxfleet.ps.client import Client
from jaxfleet.ps.messages import Kind as Message
from jaxfleet.ps.startup import given_by, run_startup
from jaxfleet.runtime.handles import Handle
from jaxfleet.runtime.job_programs import JobPrograms
from jaxfleet.runtime.saving import on_host


class ServedState:
    """Knows the leaves of a state.

    Args:
        captured: the step.
        job: its programs.
    """

    def __init__(self, captured: Captured, job: JobPrograms) -> None:
        self.captured = captured
        self._leaves = captured.signature.state
        self._program = captured.program
        self._mine = {v.name for v in job.trainer.of_kind(Kind.PARAM, Kind.STATE)}
        self._job = job
        self._places = places_of(job.server_startups)
        self._kept = kept_for_trainers(job.server_startups)
        moves = (op for op in job.trainer.root.ops if op.role in {Role.RPC, Role.DIST})
        self._received = {name for op in moves for name in op.writes}
        count = len(job.servers)
        where = "1 server" if count == 1 else f"{count} servers"
        self._handles = {
            leaf.name: Handle(leaf.name, leaf.shape, leaf.dtype, where)
            for leaf in self._leaves
            if leaf.name not in self._mine
        }

    @property
    def mine(self) -> list[Variable]:
        """The leaves that trainers have and change themselves."""
        found = [self._program.variables[leaf.name] for leaf in self._leaves]
        params = {v.name for v in self._program.of_kind(Kind.PARAM)}
        served = (params | self._received) - self._kept
        return [v for v in found if v.name in self._mine - served]

    @property
    def params(self) -> list[str]:
        """The leaves that servers have and trainers receive."""
        mine = {variable.name for variable in self.mine}
        return [leaf.name for leaf in self._leaves if leaf.name in self._mine - mine]

    def held(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Returns what a trainer's program reads, by name."""
        pairs = zip(self._leaves, leaves, strict=True)
        return {leaf.name: value for leaf, value in pairs if leaf.name in self._mine}

    def leaves(self, new: Mapping[str, Any]) -> list[Any]:
        """Returns the leaves of a state; handles for what only servers have.

        They are new at every step, so that those of an earlier one are known for what they are.
        """
        return [
            new[leaf.name] if leaf.name in self._mine else self._handles[leaf.name].again()
            for leaf in self._leaves
        ]

    def assign(
        self, client: Client, changed: Sequence[tuple[int, Any]], *, replace: bool
    ) -> dict[int, Any]:
        """Gives leaves to the servers, from trainer 0; returns what trainers go on with, by place.

        All trainers call it at the same step. Every trainer goes on with what trainer 0 had. The
        first state goes by the startup program; the leaves of a later one go as they do there,
        but all trainers give them.
        """
        client.doing("giving the state to servers")
        places = {self._leaves[at].name: at for at, _ in changed}
        program = self._job.trainer_startup
        if replace:
            program = self._exchange(client, gives=places, takes=self._mine & places.keys())
        given = set(given_by(program))
        values = {self._leaves[at].name: value for at, value in changed}
        arrays = {name: on_host(values[name]) for name in values if name in given}
        taken = run_startup(program, client, arrays, replace=replace)
        return {at: taken.get(name, self._handles.get(name)) for name, at in places.items()}

    def pull(self, client: Client, names: Sequence[str]) -> dict[str, Any]:
        """Returns leaves as servers have them now."""
        return run_startup(self._exchange(client, takes=names), client, {})

    def _exchange(
        self, client: Client, *, gives: Collection[str] = (), takes: Collection[str] = ()
    ) -> Program:
        trainer, me = self._job.trainer, client.me.trainer
        return exchange_of(
            self._program, trainer, self._places, trainer_id=me, gives=gives, takes=takes
        )

    def save_own(self, client: Client) -> None:
        """Makes servers write checkpoints of their own, so that trainers may forget pushes."""
        client.doing("checkpoint")
        servers = range(len(client.me.endpoints))
        asked = [client.request(server, Message.SAVE, body={}) for server in servers]
        client.wait(asked)
        for server, request in zip(servers, asked, strict=True):
            if request.answer is not None and request.answer.body.get("is_full"):
                client.put_off_saving()
            else:
                client.forget_saved(server, client.step)

    def own(self, leaves: Sequence[Any]) -> dict[str, np.ndarray]:
        """Returns what only trainers have, on the host."""
        pairs = zip(self._leaves, leaves, strict=True)
        return {leaf.name: on_host(value) for leaf, value in pairs if leaf.name in self._kept}
