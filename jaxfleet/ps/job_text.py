"""The text of a job's programs: what all its trainers must run, wherever its servers listen."""

import hashlib
import zlib
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

_MOST_PACKED = 4 << 20  # bytes; longer texts are compared by their digests alone
_MOST_BYTES = 256 << 20
_LINE = 300  # characters of a line that is shown
_NOTHING = "nothing more"


def without_ports(text: str, endpoints: Sequence[str]) -> str:
    """Returns a program's text with the names of servers instead of their endpoints."""
    for number, endpoint in enumerate(endpoints):
        text = text.replace(f'"{endpoint}"', f'"server {number}"')
    return text


def digest_of(text: str) -> str:
    """Returns a digest, by which trainers and servers compare texts."""
    return hashlib.sha256(text.encode()).hexdigest()


def pack_text(text: str) -> np.ndarray | None:
    """Returns a text as uint8[n], compressed; None where it is too long to travel."""
    packed = zlib.compress(text.encode())
    return np.frombuffer(packed, np.uint8) if len(packed) <= _MOST_PACKED else None


def unpack_text(packed: np.ndarray) -> str | None:
    """Returns a text that was packed; None where these bytes are none, or too many."""
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(packed.tobytes(), _MOST_BYTES)
        return data.decode() if unpacking.eof else None
    except (zlib.error, UnicodeDecodeError):
        return None


def first_difference(mine: Sequence[str], theirs: Sequence[str]) -> tuple[int, str, str] | None:
    """Returns the number of the first line that differs, from 1, and that line of both."""
    pairs = zip_longest(mine, theirs, fillvalue=_NOTHING)
    for number, (here, there) in enumerate(pairs, start=1):
        if here != there:
            return number, here.strip(), there.strip()
    return None


def text_difference(mine: np.ndarray | None, theirs: np.ndarray | None) -> str:
    """Returns where two packed texts differ, to be added to an error; empty where unknown.

    Returns:
        `; line 12 is 'w = jax.sub(w, g)' there, and here 'w = jax.add(w, g)'`.
    """
    here = None if mine is None else unpack_text(mine)
    there = None if theirs is None else unpack_text(theirs)
    if here is None or there is None:
        return ""
    found = first_difference(here.split("\n"), there.split("\n"))
    if found is None:
        return ""
    number, one, other = found
    return f"; line {number} is '{other[:_LINE]}' there, and here '{one[:_LINE]}'"
