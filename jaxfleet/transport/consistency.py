"""Consistency of a job's processes: program digests, and the first difference of two texts.

All trainers of a job must run the same program, whatever the ports of its servers. Processes
compare digests; a (compressed) text is sent only to show the first line that differs.
"""

import hashlib
import zlib
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

_MOST_PACKED = 4 << 20  # bytes; longer texts are compared only by digest
_MOST_BYTES = 256 << 20
_LINE = 300  # maximum number of characters shown
_NOTHING = "nothing more"


def mask_endpoints(text: str, endpoints: Sequence[str]) -> str:
    """Replaces server endpoints in a program's text by server numbers."""
    for number, endpoint in enumerate(endpoints):
        text = text.replace(f'"{endpoint}"', f'"server {number}"')
    return text


def text_digest(text: str) -> str:
    """Returns the digest by which trainers and servers compare texts."""
    return hashlib.sha256(text.encode()).hexdigest()


def pack_text(text: str) -> np.ndarray | None:
    """Compresses a text to uint8[n]; None if it is too long to send."""
    packed = zlib.compress(text.encode())
    return np.frombuffer(packed, np.uint8) if len(packed) <= _MOST_PACKED else None


def unpack_text(packed: np.ndarray) -> str | None:
    """Decompresses a packed text; None if the bytes are invalid or the text is too long."""
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(packed.tobytes(), _MOST_BYTES)
        return data.decode() if unpacking.eof else None
    except (zlib.error, UnicodeDecodeError):
        return None


def first_difference(mine: Sequence[str], theirs: Sequence[str]) -> tuple[int, str, str] | None:
    """Returns the number (from 1) of the first differing line, and that line of each text."""
    pairs = zip_longest(mine, theirs, fillvalue=_NOTHING)
    for number, (here, there) in enumerate(pairs, start=1):
        if here != there:
            return number, here.strip(), there.strip()
    return None


def describe_difference(mine: np.ndarray | None, theirs: np.ndarray | None) -> str:
    """Describes the first difference of two packed texts for an error; empty if unknown.

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


def same_leaves_hint(peer: str) -> str:
    """Returns a hint for peers (`trainer`, `rank`) that replaced different leaves of the state."""
    return (
        f"replace the same leaves of the state on every {peer}, between the same two steps: write "
        f"{{**state, 'epoch': n}} on all of them, not on one; an evaluation by nnx.jit writes all "
        f"Variables back, so evaluate on every {peer}, or a copy (nnx.clone, step.evaluate)"
    )
