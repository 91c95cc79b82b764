"""Ways to place slices on servers, each the same in every process, and how even the result is."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxfleet.analysis.holdings import Holding

METHODS = ("round_robin", "hash_name", "balanced")

# The most that the fullest server may hold, over the mean, unless asked for otherwise. What a hash
# does by chance is no mistake: of 8 equal slices on 8 servers it gives one more than 2 times the
# mean every second time, and more than 4 times less than once in a hundred.
MAX_IMBALANCE = 4.0


@dataclass(frozen=True)
class Balance:
    """How evenly servers are filled.

    Attributes:
        held_bytes: by endpoint, parameters and their optimizer state.
    """

    held_bytes: Mapping[str, int]

    @classmethod
    def of(
        cls, parts: Iterable[Holding], placement: Mapping[str, str], endpoints: Iterable[str]
    ) -> "Balance":
        """Returns how evenly a placement fills the servers."""
        held = dict.fromkeys(endpoints, 0)
        for part in parts:
            held[placement[part.slice.name]] += part.held_bytes
        return cls(held)

    @property
    def total(self) -> int:
        """All servers' bytes."""
        return sum(self.held_bytes.values())

    @property
    def fullest(self) -> int:
        """The bytes of the server that holds most."""
        return max(self.held_bytes.values(), default=0)

    @property
    def ratio(self) -> float:
        """What the fullest server holds, over the mean: 1 where all hold the same."""
        return self.fullest * len(self.held_bytes) / self.total if self.total else 1.0


def place(method: str, parts: Sequence[Holding], endpoints: Sequence[str]) -> dict[str, str]:
    """Returns the endpoint of each slice, by its name, in the order of the slices.

    `round_robin` takes endpoints in turn, in one walk over all slices. `hash_name` goes by the
    CRC-32 of a slice's name, so that a slice keeps its server whatever other parameters there are.
    `balanced` takes slices from the largest, and gives each to the server that holds least.

    Args:
        method: one of `METHODS`.
        parts: the slices.
        endpoints: at least one.
    """
    names = [part.slice.name for part in parts]
    if method == "balanced":
        return _balanced(parts, endpoints)
    if method == "hash_name":
        return {name: endpoints[stable_hash(name) % len(endpoints)] for name in names}
    return {name: endpoints[place % len(endpoints)] for place, name in enumerate(names)}


def stable_hash(name: str) -> int:
    """Returns a number for a name, the same in every process: Python's own hash is not."""
    return zlib.crc32(name.encode())


def _balanced(parts: Sequence[Holding], endpoints: Sequence[str]) -> dict[str, str]:
    held, placed = [0] * len(endpoints), {part.slice.name: "" for part in parts}
    for part in sorted(parts, key=lambda part: -part.held_bytes):  # equal ones stay in order
        lightest = held.index(min(held))
        held[lightest] += part.held_bytes
        placed[part.slice.name] = endpoints[lightest]
    return placed
