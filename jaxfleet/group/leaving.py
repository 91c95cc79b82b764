"""How a rank ends: with the others, or where that cannot be, by itself."""

import atexit
import os
import sys
from typing import NoReturn

from jaxfleet.errors import JaxfleetError
from jaxfleet.group.membership import Joined

_FAILED = 1


def leave_at_exit(joined: Joined) -> None:
    """Makes this process wait for the others before it ends.

    jax ends its distributed part when Python does, and aborts every process where one is not
    there in time. This runs before it, since it was registered later. Where the group is broken,
    jax's end would hang, and so would threads that wait inside a collective: then the process ends
    here, with status 1, whatever status it was about to end with.
    """
    atexit.register(_leave, joined)


def _leave(joined: Joined) -> None:
    error = getattr(sys, "last_value", None)  # what Python has just printed the traceback of
    if error is not None and not isinstance(error, SystemExit):
        joined.member.fail(f"{type(error).__name__}: {error}"[:500])
        _end(joined)
    try:
        joined.leave()
    except JaxfleetError as found:
        if not joined.member.has_raised:
            print(f"jaxfleet: rank {joined.rank} ends: {found}", file=sys.stderr)  # noqa: T201
        _end(joined)


def _end(joined: Joined) -> NoReturn:
    joined.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_FAILED)
