"""Runs a startup program: gives servers a state, and receives what a trainer goes on with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxfleet.ir import Operator, Program
from jaxfleet.ps.client import Client
from jaxfleet.ps.host_run import Host, HostRun
from jaxfleet.ps.messages import Kind, Plain, Tensor


def run_startup(
    program: Program, client: Client, state: Mapping[str, np.ndarray], *, replace: bool = False
) -> dict[str, Any]:
    """Runs a startup program, or one that gives and takes some leaves later.

    Args:
        program: a trainer's.
        client: the lines to the servers.
        state: the leaves that it gives.
        replace: all trainers give leaves, in the place of what servers have; else servers take
            them only where they have none.

    Returns:
        The leaves that it takes, on the device.

    Raises:
        PeerLostError: a server, or a trainer that it waits for, went or takes too long.
    """
    run = _StartupRun(Host(program, client), program.root.ops, dict(state), replace=replace)
    run.run()
    return {name: run.values[name] for name in taken_by(program)}


def given_by(program: Program) -> list[str]:
    """Returns the leaves that a startup program gives to servers."""
    read = {name for op in program.root.ops for name in op.reads}
    return [name for name in program.variables if name in read]


def taken_by(program: Program) -> list[str]:
    """Returns the leaves that a startup program takes from servers."""
    written = {name for op in program.root.ops for name in op.writes}
    return [name for name in program.variables if name in written]


@dataclass
class _StartupRun(HostRun):
    """Does the operators one by one; what is sent is a state, and is answered.

    Attributes:
        replace: servers take it in the place of what they have.
        given: what is sent, by server.
    """

    replace: bool = False
    given: dict[int, list[Tensor]] = field(default_factory=dict)

    def run(self) -> None:
        """Does them all."""
        does: Mapping[str, Callable[[Operator], None]] = {
            "split_byref": self._split,
            "assign": self._assign,
            "send": self._send,
            "send_barrier": self._give,
            "fetch_barrier": self._fetch,
        }
        for op in self.ops:
            if op.type in does:  # the others are done at the barrier
                does[op.type](op)

    def _assign(self, op: Operator) -> None:
        self.values[op.writes[0]] = self.values[op.reads[0]]

    def _wire_name(self, name: str) -> str:
        return name  # a leaf may be called as it likes

    def _push(self, server: int, tensor: Tensor, how: Plain) -> None:
        del how  # a state travels as it is
        self.given.setdefault(server, []).append(tensor)

    def _give(self, op: Operator) -> None:
        """Sends every server what is for it, and waits until all have it."""
        body, client = {"replace": self.replace}, self.host.client
        client.wait([
            client.request(server, Kind.ASSIGN, body=body, tensors=self.given.get(server, ()))
            for server in self._servers(op, "endpoints")
        ])  # fmt: skip

    def _fetch(self, _: Operator) -> None:
        self._receive()
        self.host.client.wait(self.requests)
        self._finish(())
