"""The peak of a step in parts: what lies between executables, and what the running one takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxfleet.analysis.memory.sizes import bytes_of
from jaxfleet.ir import Kind
from jaxfleet.lower.segmented import Part


@dataclass(frozen=True)
class Peak:
    """The most that a step takes besides what goes in and comes out.

    Attributes:
        bytes: on one device.
        part: the number of the executable that ran then.
        alive: the temporaries that lay between executables then, and their bytes.
        temp_bytes: of the executable.
        curve: the bytes while each executable runs, in order.
        host_bytes: the most that lies in pinned memory of the host, of one device.
    """

    bytes: int
    part: int
    alive: Mapping[str, int]
    temp_bytes: int
    curve: tuple[int, ...]
    host_bytes: int = 0


def peak_of(parts: Sequence[Part], returned: Sequence[str]) -> Peak:
    """Returns the peak of a step, from what xla says of each executable; compiles them.

    Args:
        parts: the step.
        returned: the temporaries that are outputs of the step, which count for nothing.
    """
    held: dict[str, int] = {}
    on_host, most_on_host = dict[str, int](), 0
    temps: dict[int, int] = {}
    found: list[tuple[int, dict[str, int], int]] = []
    for part in parts:
        if id(part.run) not in temps:
            temps[id(part.run)] = part.temp_bytes
        sent = [move.to for move in part.moves if move.leaves]
        on_host.update((name, bytes_of(part.types[name], {})) for name in sent)
        most_on_host = max(most_on_host, sum(on_host.values()))
        made = {
            name: bytes_of(part.types[name], {})
            for name in (*part.writes, *(move.to for move in part.moves if not move.leaves))
            if part.types[name].kind is Kind.TEMP and name not in returned
        }
        during = {**held, **made}
        given = sum(held.get(name, 0) for name in part.donated)
        temp = temps[id(part.run)]
        found.append((sum(during.values()) - given + temp, during, temp))
        held = {name: size for name, size in during.items() if name not in part.drops}
        on_host = {name: size for name, size in on_host.items() if name not in part.drops}
    place = max(range(len(found)), key=lambda n: found[n][0])
    total, alive, temp = found[place]
    curve = tuple(size for size, _, _ in found)
    return Peak(total, place, alive, temp, curve, most_on_host)


def peak_of_one(executable: Any) -> Peak:
    """Returns the peak of a step that is one executable, as xla says it.

    Args:
        executable: what jax compiled.
    """
    temp = int(executable.memory_analysis().temp_size_in_bytes)
    return Peak(temp, 0, {}, temp, (temp,))


def count_runs(runs: Sequence[Any]) -> tuple[int, int]:
    """Returns how many executables run one after another, and how many of them differ."""
    return len(runs), len(set(map(id, runs)))
