"""Shutdown of a rank: with the others, or alone if they are gone."""

import atexit
import faulthandler
import os
import sys
import threading
import time
from typing import NoReturn

from jaxfleet.cluster.process_group import ProcessGroup
from jaxfleet.errors import JaxfleetError

_FAILED = 1
_LOOK_S = 0.2


def leave_at_exit(joined: ProcessGroup) -> None:
    """Makes this process wait for the others before it ends.

    jax's own shutdown runs when Python ends, and aborts every process if one does not arrive in
    time. This function registers its handler later, so it runs earlier. In a failed group jax's
    shutdown would hang, and so would threads inside a collective: then the process ends here, with
    status 1 whatever its status was to be.
    """
    atexit.register(_leave, joined, os.getpid())


def guard(joined: ProcessGroup) -> None:
    """Ends this process if the group has failed but its main thread never learns of it.

    The main thread may wait inside XLA for an array of all ranks, where nothing can be raised, or
    elsewhere. It has `joined.patience_s` after the failure is known.
    """
    threading.Thread(target=_guard, args=(joined,), name="jaxfleet-guard", daemon=True).start()


def _guard(joined: ProcessGroup) -> None:
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


def _leave(joined: ProcessGroup, process: int) -> None:
    if os.getpid() != process:  # a fork shares the connections but is not a rank
        return
    error = getattr(sys, "last_value", None)  # Python has just printed its traceback
    if error is not None:
        joined.member.fail(f"{type(error).__name__}: {error}"[:500])
        _end(joined)
    was_told = joined.member.has_raised
    try:
        joined.leave()
    except JaxfleetError as found:
        if not was_told:
            notes = getattr(found, "__notes__", ())
            _say("\n".join([f"jaxfleet: rank {joined.rank} ends: {found}", *notes]))
        _end(joined)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _end(joined: ProcessGroup) -> NoReturn:
    joined.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_FAILED)
