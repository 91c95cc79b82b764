"""The errors that end a trainer's wait: a server refuses, is late, or is gone."""

from collections.abc import Mapping, Sequence

from jaxfleet.errors import (
    CheckpointError,
    ConnectError,
    JaxfleetError,
    PeerLostError,
    ProgramError,
)
from jaxfleet.ps.heartbeat import Pulse
from jaxfleet.ps.membership import Membership
from jaxfleet.ps.messages import Message
from jaxfleet.ps.requests import Request

_ERRORS: Mapping[str, type[JaxfleetError]] = {
    "peer_lost": PeerLostError,
    "timeout": PeerLostError,
    "checkpoint": CheckpointError,
}


def refused(me: Membership, server: int, message: Message) -> JaxfleetError:
    """Returns what a server said in its error."""
    body, where = message.body, me.server_name(server)
    what = f"{body.get('what', 'no reason given')} (said {where})"
    hint = str(body["hint"]) if body.get("hint") else None
    return _ERRORS.get(str(body.get("error")), ProgramError)(what, hint=hint)


def late(
    me: Membership,
    request: Request,
    limit_s: float,
    error: type[JaxfleetError],
    pulse: Pulse | None,
) -> JaxfleetError:
    """Returns that a request took too long.

    Args:
        me: who waited.
        request: for what.
        limit_s: how long.
        error: what to make of it.
        pulse: what the server said last, where heartbeats are taken.
    """
    where = me.server_name(request.server)
    what = f"{me.name} waited {limit_s:.0f} s at step {request.message.step} for {request}"
    what = f"{what} from {where}{_last_heard(pulse)}"
    hint = "see what that server, and the trainers it waits for, are doing"
    if error is ConnectError:
        hint = "start the servers, with the same endpoints and secret"
    return error(what, hint=hint)


def waited_for(me: Membership, request: Request, others: int, pulse: Pulse | None) -> str:
    """Returns what a trainer waits for, for the log.

    Args:
        me: the trainer.
        request: what it waits for.
        others: how many other requests it waits for.
        pulse: the last heartbeat of the server, where heartbeats are taken.
    """
    where, more = me.server_name(request.server), f", and {others} more" if others else ""
    what = f"{me.name} waits at step {request.message.step} for {request} from {where}{more}"
    lost = f"; it has lost {', '.join(pulse.lost)}" if pulse is not None and pulse.lost else ""
    return f"{what}{_last_heard(pulse)}{lost}"


def _last_heard(pulse: Pulse | None) -> str:
    if pulse is None:
        return ""
    if pulse.last_heard_s is None:
        return ", which has never sent a heartbeat"
    return f"; its last heartbeat said '{pulse.doing}'"


def lost(
    me: Membership,
    server: int,
    requests: Sequence[Request],
    *,
    step: int,
    limit_s: float,
    doing: str,
) -> PeerLostError:
    """Returns that a server is gone.

    Args:
        me: who misses it.
        server: which.
        requests: what is waited for.
        step: the step that the trainer is at.
        limit_s: how long it was silent.
        doing: what it said last that it did.
    """
    waits = [r for r in requests if r.server == server and not r.is_done]
    for_what = f" while {me.name} waited for {waits[0]}" if waits else ""
    what = (
        f"{me.server_name(server)} was lost at step {step}{for_what}: no "
        f"heartbeat for {limit_s:.1f} s; its last said '{doing}'"
    )
    return PeerLostError(what, hint="look at that server's log; start the job again")
