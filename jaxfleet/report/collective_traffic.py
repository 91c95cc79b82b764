"""What collectives send over each link between devices in a step, as rings send it.

An all-reduce of n bytes over d devices sends 2 (d - 1) / d n over each link of a ring, which no
algorithm betters (Patarasuk and Yuan, 2009); its halves are the reduce-scatter and the all-gather.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxfleet.ir import Block, Operator, Program
from jaxfleet.report.facts import UNUSUAL, size_or_none, turns_of
from jaxfleet.report.model import NONE, DeviceLinks, LinkKind
from jaxfleet.report.rank_labels import ranks_of

_MOST_LISTED = 16  # devices whose links are listed one by one
_GATHERED = frozenset({"c_allreduce_prod", "c_allreduce_and", "c_allreduce_or", "c_allreduce_xor"})


@dataclass(frozen=True)
class _Ring:
    """Links over which a collective sends: device i to i + `step`, around in groups of `size`.

    With `partner` it is i ^ `step` instead, in both directions.
    """

    step: int
    size: int
    partner: bool = False

    def next(self, device: int) -> int:
        if self.partner:
            return device ^ self.step
        first = device // (self.step * self.size) * (self.step * self.size)
        return first + (device - first + self.step) % (self.step * self.size)

    def says(self, devices: int) -> str:
        if self.partner:
            return f"each device and the one {self.step} away, in both directions"
        if self.size == devices:
            return "each device to the next"
        if self.step == 1:
            return f"each device to the next of its {self.size}"
        return f"each device to its like in the next group of {self.step}"


def device_links(program: Program, sizes: Mapping[str, int]) -> DeviceLinks | None:
    """Returns the links of a step's devices or ranks; None if it has one, or sends nothing.

    A collective in a loop counts in every turn, and of branches each one does.
    """
    given = program.attrs.get("devices", 1)
    devices = max(given if isinstance(given, int) else 1, ranks_of(program))
    if devices < 2:
        return None
    sent: dict[_Ring, float] = {}
    counts: dict[_Ring, int] = {}
    unknown = 0
    for op, block, turns in _collectives(program, program.root, sizes, 1):
        size = _bytes(program, op, block, sizes)
        if size == NONE:
            unknown += 1
            continue
        for ring, share in _shares(op, devices).items():
            sent[ring] = sent.get(ring, 0) + share * size * turns
            counts[ring] = counts.get(ring, 0) + 1
    if not sent and not unknown:
        return None
    kinds = tuple(
        LinkKind(ring.says(devices), devices, round(size), counts[ring])
        for ring, size in sent.items()
    )
    return DeviceLinks(devices, kinds, _listed(sent, devices), unknown)


def _collectives(
    program: Program, block: Block, sizes: Mapping[str, int], turns: int
) -> Iterator[tuple[Operator, Block, int]]:
    for op in block.ops:
        if op.type in _SHARES or op.type.startswith(("c_allreduce", "allreduce")):
            yield op, block, turns
        for index in op.blocks:
            inside = turns * turns_of(op, sizes)
            yield from _collectives(program, program.blocks[index], sizes, inside)


def _bytes(program: Program, op: Operator, block: Block, sizes: Mapping[str, int]) -> int:
    try:
        found = [size_or_none(program.lookup(name, block), sizes) for name in op.reads]
    except UNUSUAL:
        return NONE
    return NONE if NONE in found else sum(found)


# Of the bytes that a device gives, those that pass each link of a ring of d devices. `c_broadcast`
# is lowered to a sum with zeros; a part of an all-to-all passes as many links as it has to go.
_SHARES = {
    "c_allgather": lambda d: d - 1,
    "c_reducescatter": lambda d: (d - 1) / d,
    "c_broadcast": lambda d: 2 * (d - 1) / d,
    "broadcast": lambda d: 2 * (d - 1) / d,
    "c_alltoall": lambda d: (d - 1) / 2,
}


def _shares(op: Operator, devices: int) -> dict[_Ring, float]:
    """Returns what passes each link, as shares of the bytes that a device gives."""
    whole = _Ring(1, devices)
    if op.type in _SHARES:
        return {whole: _SHARES[op.type](devices)}
    if op.type in _GATHERED:
        return {whole: devices - 1}
    if op.attrs.get("exchange"):
        return {_Ring(1 << n, 2, partner=True): 1 for n in range((devices - 1).bit_length())}
    within = op.attrs.get("within")
    if isinstance(within, int) and 1 < within < devices and devices % within == 0:
        groups = devices // within
        inside = 2 * (within - 1) / within
        return {_Ring(1, within): inside, _Ring(within, groups): 2 * (groups - 1) / devices}
    return {whole: 2 * (devices - 1) / devices}


def _listed(sent: Mapping[_Ring, float], devices: int) -> tuple[tuple[int, int, int], ...]:
    if devices > _MOST_LISTED:
        return ()
    found: dict[tuple[int, int], float] = {}
    for ring, size in sent.items():
        for device in range(devices):
            link = device, ring.next(device)
            found[link] = found.get(link, 0) + size
    return tuple((a, b, round(size)) for (a, b), size in sorted(found.items()))
