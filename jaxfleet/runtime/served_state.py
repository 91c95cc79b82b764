"""The leaves of a state in a parameter-server job: which are where, and how they travel."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxfleet.capture import Captured
from jaxfleet.ir import Kind, Program, Variable
from jaxfleet.lower import host_type, to_device
from jaxfleet.ps.aligned import aligned_empty
from jaxfleet.ps.client import Client
from jaxfleet.ps.messages import Kind as Message
from jaxfleet.ps.messages import Tensor
from jaxfleet.ps.requests import Request
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
        self._pieces = pieces_of(job.servers)
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
        served = {v.name for v in self._program.of_kind(Kind.PARAM) if v.name in self._pieces}
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

        All trainers call it at the same step. Every trainer goes on with what trainer 0 had.
        """
        client.doing("giving the state to servers")
        arrays = {self._leaves[at].name: on_host(value) for at, value in changed}
        if replace or client.me.trainer == 0:
            servers = range(len(client.me.endpoints))
            client.wait([self._assign_to(client, s, arrays, replace=replace) for s in servers])
        values = self.pull(client, [*arrays])
        places = {self._leaves[at].name: at for at, _ in changed}
        return {at: self._handles.get(name, values[name]) for name, at in places.items()}

    def _assign_to(
        self, client: Client, server: int, arrays: Mapping[str, np.ndarray], *, replace: bool
    ) -> Request:
        tensors = self._tensors(server, arrays)
        return client.request(server, Message.ASSIGN, body={"replace": replace}, tensors=tensors)

    def pull(self, client: Client, names: Sequence[str]) -> dict[str, Any]:
        """Returns leaves as servers have them now."""
        buffers = {name: self._buffer(name) for name in names}
        asked: dict[int, dict[str, np.ndarray]] = {}
        for name in names:
            for server, piece, start, rows in self._pieces.get(name, [(0, name, 0, None)]):
                whole = buffers[name]
                part = whole if rows is None else whole[start : start + rows]
                asked.setdefault(server, {})[piece] = part
        client.wait([self._pull_from(client, server, parts) for server, parts in asked.items()])
        return {
            name: to_device(buffer, self._program.variables[name].dtype)[0]
            for name, buffer in buffers.items()
        }

    def save_own(self, client: Client) -> None:
        """Makes servers write checkpoints of their own, so that trainers may forget pushes."""
        client.doing("checkpoint")
        servers = range(len(client.me.endpoints))
        client.wait([client.request(server, Message.SAVE, body={}) for server in servers])
        for server in servers:
            client.forget_saved(server, client.step)

    def own(self, leaves: Sequence[Any]) -> dict[str, np.ndarray]:
        """Returns what only trainers have, on the host."""
        pairs = zip(self._leaves, leaves, strict=True)
        return {leaf.name: on_host(value) for leaf, value in pairs if leaf.name not in self._pieces}

    def _pull_from(self, client: Client, server: int, parts: Mapping[str, np.ndarray]) -> Request:
        def take(tensor: Tensor) -> None:
            np.copyto(parts[tensor.name], tensor.array, casting="no")

        names = list(parts)
        body: dict[str, Any] = {"names": names}
        return client.request(server, Message.PULL, body=body, wants=names, sink=take)

    def _tensors(self, server: int, arrays: Mapping[str, np.ndarray]) -> list[Tensor]:
        found = []
        for name, array in arrays.items():
            for at, piece, start, rows in self._pieces.get(name, [(0, name, 0, None)]):
                if at == server:
                    part = array if rows is None else array[start : start + rows]
                    found.append(Tensor(piece, part))
        return found

    def _buffer(self, name: str) -> np.ndarray:
        held = host_type(self._program.variables[name])
        return aligned_empty(held.shape, held.dtype)


Piece = tuple[int, str, int, int | None]  # server, name there, first row, rows (None: all)


def pieces_of(servers: Sequence[Program]) -> dict[str, list[Piece]]:
    """Returns where servers have each leaf of the state, whole or in rows.

    Of a leaf that several servers have whole, all are in the list.
    """
    found: dict[str, list[Piece]] = {}
    for server, program in enumerate(servers):
        held = _held(program)
        for variable in program.of_kind(Kind.PARAM, Kind.STATE):
            leaf, start = held.get(variable.name, (variable.name, -1))
            size = variable.shape[0] if start >= 0 else None
            rows = size if isinstance(size, int) else None
            piece = (server, variable.name, max(start, 0), rows)
            found.setdefault(leaf, []).append(piece)
    return found


def _held(program: Program) -> dict[str, tuple[str, int]]:
    """Returns the leaf and the first row of each variable that is a slice."""
    found = {}
    held = program.attrs.get("holds", ())
    assert isinstance(held, tuple)
    for entry in held:
        match entry:
            case (str(name), str(leaf), int(start)):
                found[name] = (leaf, start)
    return found
