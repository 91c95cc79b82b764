"""Asks servers for slices of variables that trainers do not have, and joins them."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from jaxfleet.fluid.pserver.connections import Connection
from jaxfleet.ps.messages import Kind, Tensor

Parts: TypeAlias = Mapping[str, Sequence[tuple[str, str]]]  # a variable's slices, and where each is


def pull_whole(connection: Connection, parts: Parts) -> dict[str, np.ndarray]:
    """Returns whole variables as servers have them after this trainer's last step.

    Args:
        connection: the trainer's lines.
        parts: by variable, its slices in the order of their rows, with the endpoint of each.

    Raises:
        PeerLostError: a server went, or takes too long.
        ClosedError: this trainer has closed.
    """
    connection.check()
    client, found = connection.client, dict[tuple[int, str], np.ndarray]()
    numbers = {endpoint: n for n, endpoint in enumerate(client.me.endpoints)}
    asked: dict[int, list[str]] = {}
    for slices in parts.values():
        for name, endpoint in slices:
            asked.setdefault(numbers[endpoint], []).append(name)

    def take(server: int, tensors: Sequence[Tensor]) -> None:
        found.update({(server, tensor.name): tensor.array.copy() for tensor in tensors})

    client.wait([
        client.request(
            server,
            Kind.PULL,
            body={"names": list(names)},
            wants=names,
            sink=partial(take, server),
        )
        for server, names in asked.items()
    ])  # fmt: skip
    return {
        whole: _joined([found[numbers[endpoint], name] for name, endpoint in slices])
        for whole, slices in parts.items()
    }


def _joined(slices: Sequence[np.ndarray]) -> np.ndarray:
    return slices[0] if len(slices) == 1 else np.concatenate(slices)
