"""Consistency checks between ranks and between trainers before they run a step together."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxfleet.capture import Captured
from jaxfleet.cluster.global_arrays import digest
from jaxfleet.ir import Program
from jaxfleet.ops.user_frames import warn_at_caller
from jaxfleet.strategy import DistributedStrategy
from jaxfleet.transport.messages import Kind, Tensor

if TYPE_CHECKING:  # ranks have no client
    from jaxfleet.ps.client.client import Client

# Deadlines may differ between ranks; an outer optimizer is part of the program's text.
_OWN = {"lost_after_s", "step_timeout_s", "connect_s", "outer"}


def description(
    strategy: DistributedStrategy, captured: Captured, program: Program, data: Sequence[Any]
) -> list[str]:
    """Returns the lines that must be the same on all ranks.

    They describe the strategy, the transpiled program, and the batch `data` of this rank.
    """
    fields = dataclasses.fields(strategy)
    names = [leaf.name for leaf in captured.signature.batch]
    return [
        f"jax {jax.__version__} with jax_enable_x64={jax.config.jax_enable_x64}",  # type: ignore[attr-defined]  # jax makes it up
        *(
            f"strategy: {x.name}={getattr(strategy, x.name)!r}"
            for x in fields
            if x.name not in _OWN
        ),
        *(f"batch: {n} {list(np.shape(x))}" for n, x in zip(names, data, strict=True)),
        *str(program).splitlines(),
    ]


def warn_of_own_batches(digests: Sequence[str], *, who: str = "rank") -> None:
    """Warns if ranks pass different batches where each should pass the whole one.

    It is not an error, since rows may be drawn at random on purpose. `digests` are the batches' by
    rank; `who` names the ranks.
    """
    if len(set(digests)) == 1:
        return
    differ = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    warn_at_caller(
        f"{who}s 0 and {differ} bring different batches, and of each only the rows at its own place"
        f" are used; where a {who} brings its own rows, say DistributedStrategy(batch='local')"
    )


def compare_batches(client: "Client", data: Sequence[Any]) -> None:
    """Warns, on every trainer, if their whole batches `data` differ; collective."""
    own = hashlib.sha256(" ".join(map(digest, data)).encode()).digest()[:8]
    came: list[np.ndarray] = []
    request = client.request(
        0,
        Kind.REDUCE,
        body={"key": "comparing batches", "how": "gather"},
        tensors=[Tensor("digest", np.frombuffer(own, np.int64))],
        wants=["digest"],
        sink=lambda answer: came.extend(tensor.array.copy() for tensor in answer),
    )
    client.wait([request])
    warn_of_own_batches([str(each) for array in came for each in array.ravel()], who="trainer")
