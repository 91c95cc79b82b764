"""Makes the C library keep memory that was freed, for the next step to use.

Messages and gradients of some MB come and go at every step. By default glibc gives such memory
back to the system, which clears each page again when it is next touched: measured, a quarter of a
step's time.
"""

import ctypes
import sys

# The numbers of glibc's `mallopt`, from its malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_KEPT_BYTES = 1 << 30
_PAD_BYTES = 1 << 26
_LARGEST_MMAP_THRESHOLD = 1 << 25  # what glibc takes at most


def keep_freed_memory() -> bool:
    """Sets it for this process; tells whether the C library knows how."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = (
        (_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD),
        (_TRIM_THRESHOLD, _KEPT_BYTES),
        (_TOP_PAD, _PAD_BYTES),
        (_ARENA_MAX, 1),  # glibc gives back what is free in the others, whatever it was told
    )
    done = [mallopt(number, value) for number, value in settings]
    return done == [1] * len(settings)
