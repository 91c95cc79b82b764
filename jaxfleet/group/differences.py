"""The first line in which the texts of several ranks differ."""

import hashlib
import zlib
from collections.abc import Callable, Sequence

from jaxfleet.ps.job_text import first_difference as first_line

Exchange = Callable[[str, bytes], list[bytes]]
"""Gives each rank what all have: a name for it, this rank's; all ranks', by rank."""


def first_difference(lines: Sequence[str], exchange: Exchange) -> str | None:
    """Returns which ranks have something else than rank 0, and where; None where none has.

    Whole texts travel only where their digests differ.

    Args:
        lines: this rank's.
        exchange: with all ranks.
    """
    text = "\n".join(lines).encode()
    digests = exchange("comparing", hashlib.sha256(text).digest())
    if len(set(digests)) == 1:
        return None
    packed = exchange("comparing line by line", zlib.compress(text))
    texts = [zlib.decompress(each).decode() for each in packed]
    first, *others = (each.split("\n") for each in texts)
    differ = [rank for rank, found in enumerate(others, start=1) if found != first]
    found = first_line(first, others[differ[0] - 1])
    assert found is not None
    number, here, there = found
    named = " and ".join(f"rank {rank}" for rank in differ)
    shown = f"rank 0 has '{here}', rank {differ[0]} '{there}'"
    return f"{named} differ{'s' if len(differ) == 1 else ''} from rank 0; line {number}: {shown}"
