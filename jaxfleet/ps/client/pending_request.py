"""A trainer's request to a server, and the errors that end its wait."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxfleet.errors import (
    CheckpointError,
    ConnectError,
    JaxfleetError,
    PeerLostError,
    ProgramError,
)
from jaxfleet.ps.client.heartbeat import Pulse
from jaxfleet.ps.client.trainer_identity import TrainerIdentity
from jaxfleet.transport.messages import Message, Tensor


@dataclass(eq=False)
class PendingRequest:
    """One request to one server, until its reply is complete.

    Attributes:
        wants: names still missing from the reply; empty if any reply completes it.
        answer: the last message of the reply, once complete.
    """

    server: int
    message: Message
    wants: set[str] = field(default_factory=set)
    sink: Callable[[Sequence[Tensor]], None] | None = None
    answer: Message | None = None

    @property
    def is_done(self) -> bool:
        return self.answer is not None

    def take(self, message: Message) -> None:
        """Takes a reply or a part of it; duplicates are ignored."""
        fresh = [x for x in message.tensors if not self.wants or x.name in self.wants]
        if self.sink is not None and fresh:
            self.sink(fresh)
        self.wants.difference_update(tensor.name for tensor in fresh)
        if not self.wants:
            self.answer = message

    def __str__(self) -> str:
        body, kind = self.message.body, self.message.kind.value
        names = sorted(self.wants)
        if names:
            more = f" and {len(names) - 2} more" if len(names) > 2 else ""
            return f"{kind} of {', '.join(names[:2])}{more}"
        if kind == "look_up":
            return f"rows of table '{body.get('table')}'"
        if kind in {"shrink", "export"}:
            return f"{kind} of table '{body.get('table')}'"
        if kind == "reduce":
            return f"sum '{body.get('key')}' over all trainers"
        if kind == "barrier":
            return f"barrier '{body.get('name')}'"
        return kind


_ERRORS: Mapping[str, type[JaxfleetError]] = {
    "peer_lost": PeerLostError,
    "timeout": PeerLostError,
    "checkpoint": CheckpointError,
}


def refusal_error(me: TrainerIdentity, server: int, message: Message) -> JaxfleetError:
    """Returns the exception for a server's error message."""
    body, where = message.body, me.server_name(server)
    what = f"{body.get('what', 'no reason given')} (reported by {where})"
    hint = str(body["hint"]) if body.get("hint") else None
    return _ERRORS.get(str(body.get("error")), ProgramError)(what, hint=hint)


def timeout_error(
    me: TrainerIdentity,
    request: PendingRequest,
    limit_s: float,
    error: type[JaxfleetError],
    pulse: Pulse | None,
) -> JaxfleetError:
    """Returns the error for a request that timed out."""
    where = me.server_name(request.server)
    what = f"{me.name} waited {limit_s:.0f} s at step {request.message.step} for {request}"
    what = f"{what} from {where}{_last_heard(pulse)}"
    hint = "see what that server, and the trainers it waits for, are doing"
    if error is ConnectError:
        hint = "start the servers, with the same endpoints and secret"
    return error(what, hint=hint)


def describe_wait(
    me: TrainerIdentity, request: PendingRequest, others: int, pulse: Pulse | None
) -> str:
    """Describes a trainer's wait for the log."""
    where, more = me.server_name(request.server), f", and {others} more" if others else ""
    what = f"{me.name} waits at step {request.message.step} for {request} from {where}{more}"
    lost = f"; it has lost {', '.join(pulse.lost)}" if pulse is not None and pulse.lost else ""
    return f"{what}{_last_heard(pulse)}{lost}"


def _last_heard(pulse: Pulse | None) -> str:
    if pulse is None:
        return ""
    if pulse.last_heard_s is None:
        return ", which has never sent a heartbeat"
    return f"; its last heartbeat reported '{pulse.doing}'"


def lost_server_error(
    me: TrainerIdentity,
    server: int,
    requests: Sequence[PendingRequest],
    *,
    step: int,
    limit_s: float,
    doing: str,
) -> PeerLostError:
    """Returns the error for a lost server."""
    waits = [r for r in requests if r.server == server and not r.is_done]
    for_what = f" while {me.name} waited for {waits[0]}" if waits else ""
    what = (
        f"{me.server_name(server)} was lost at step {step}{for_what}: no "
        f"heartbeat for {limit_s:.1f} s; its last reported '{doing}'"
    )
    return PeerLostError(what, hint="look at that server's log; start the job again")
