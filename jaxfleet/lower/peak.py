"""The peak of a step in parts: what lies between executables, and what the running one takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    """

    bytes: int
    part: int
    alive: Mapping[str, int]
    temp_bytes: int
    curve: tuple[int, ...]


def peak_of(parts: Sequence[Part], returned: Sequence[str]) -> Peak:
    """Returns the peak of a step, from what xla says of each executable; compiles them.

    Args:
        parts: the step.
        returned: the temporaries that are outputs of the step, which count for nothing.
    """
    held: dict[str, int] = {}
    temps: dict[int, int] = {}
    found: list[tuple[int, dict[str, int], int]] = []
    for part in parts:
        if id(part.run) not in temps:
            temps[id(part.run)] = part.temp_bytes
        made = {
            name: bytes_of(part.types[name], {})
            for name in part.writes
            if part.types[name].kind is Kind.TEMP and name not in returned
        }
        during = {**held, **made}
        given = sum(held.get(name, 0) for name in part.donated)
        temp = temps[id(part.run)]
        found.append((sum(during.values()) - given + temp, during, temp))
        held = {name: size for name, size in during.items() if name not in part.drops}
    place = max(range(len(found)), key=lambda n: found[n][0])
    total, alive, temp = found[place]
    return Peak(total, place, alive, temp, tuple(size for size, _, _ in found))
