"""How a rank ends: with the others, or where that cannot be, by itself."""

import atexit
import faulthandler
import os
import sys
import threading
import time
from typing import NoReturn

from jaxfleet.errors import JaxfleetError
from jaxfleet.group.membership import Joined

_FAILED = 1
_LOOK_S = 0.2


def leave_at_exit(joined: Joined) -> None:
    """Makes this process wait for the others before it ends.

    jax ends its distributed part when Python does, and aborts every process where one is not
    there in time. This runs before it, since it was registered later. Where the group is broken,
    jax's end would hang, and so would threads that wait inside a collective: then the process ends
    here, with status 1, whatever status it was about to end with.
    """
    atexit.register(_leave, joined, os.getpid())


def guard(joined: Joined) -> None:
    """Ends this process where the group is broken and its main thread does not come to hear it.

    It may wait inside XLA for an array of all ranks, where nothing can be raised, or for whatever
    else. It has `joined.patience_s` from when the others are known to be gone.
    """
    threading.Thread(target=_guard, args=(joined,), name="jaxfleet-guard", daemon=True).start()


def _guard(joined: Joined) -> None:
    member, since_s = joined.member, None
    while not joined.is_closed and not member.has_raised:
        time.sleep(_LOOK_S)
        if member.verdict is None:
            continue
        since_s = time.monotonic() if since_s is None else since_s
        waited_s = time.monotonic() - since_s
        if waited_s > joined.patience_s and not member.has_raised:
            text = f"{member.error(member.verdict)}; this rank did not come to its next step within"
            _say(f"jaxfleet: rank {joined.rank} is ended: {text} {waited_s:.0f} s, but stood here:")
            faulthandler.dump_traceback()
            _end(joined)


def _leave(joined: Joined, process: int) -> None:
    if os.getpid() != process:  # a fork has the lines in name only, and is nobody's rank
        return
    error = getattr(sys, "last_value", None)  # what Python has just printed the traceback of
    if error is not None:
        joined.member.fail(f"{type(error).__name__}: {error}"[:500])
        _end(joined)
    was_told = joined.member.has_raised
    try:
        joined.leave()
    except JaxfleetError as found:
        if not was_told:
            _say(f"jaxfleet: rank {joined.rank} ends: {found}")
        _end(joined)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _end(joined: Joined) -> NoReturn:
    joined.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_FAILED)
