"""Says what is wrong with whom a request waits for: they left, are lost, or take too long."""

from collections.abc import Mapping, Sequence

from jaxfleet.ps.server.desk import RefusedError, Request
from jaxfleet.ps.server.options import ServerOptions
from jaxfleet.ps.server.peers import Known, Trainers

_SHOWN = 3  # names of what is missing


def complaint(
    request: Request,
    missing: Mapping[str, Sequence[str]],
    *,
    trainers: Trainers,
    servers: Mapping[int, Known],
    options: ServerOptions,
    now: float,
) -> RefusedError | None:
    """Returns the error that ends a wait, or None where it may go on.

    Args:
        request: who waits, since when, for which step.
        missing: what has not come, by who was to send it: `trainer 1`, `server 0`.
        trainers: the job's.
        servers: the others that were heard of.
        options: how long to wait.
        now: the time.
    """
    waited = now - request.since
    for who, things in missing.items():
        kind, _, number = who.partition(" ")
        known = (servers if kind == "server" else trainers.by_id).get(int(number))
        if known is not None and known.left:
            text = f"{who} said bye after step {known.step}"
            return _error("peer_lost", request, things, text, waited)
        patience = options.lost_after_s + (options.server_return_s if kind == "server" else 0.0)
        if known is not None and now - known.heard > patience:
            silent = f"not heard of for {now - known.heard:.1f} s"
            text = f"{who} is lost: {silent}, {known.text(now)}"
            return _error("peer_lost", request, things, text, waited)
    if missing and waited > options.step_timeout_s:
        who, things = next(iter(missing.items()))
        kind, _, number = who.partition(" ")
        known = (servers if kind == "server" else trainers.by_id).get(int(number))
        refused = trainers.refused.get(int(number)) if kind == "trainer" else None
        never = f"{who} never said hello" if refused is None else f"{who} was refused: {refused}"
        text = f"{who}: {known.text(now)}" if known is not None else never
        return _error("timeout", request, things, text, waited)
    return None


def _error(
    code: str, request: Request, things: Sequence[str], text: str, waited: float
) -> RefusedError:
    shown = ", ".join(things[:_SHOWN])
    if len(things) > _SHOWN:
        shown += f" and {len(things) - _SHOWN} more"
    message = request.message
    what = f"{text}; {message.sender} waited {waited:.1f} s in {message.kind.value} of step"
    what = f"{what} {message.step} for {shown}"
    hint = "look at that process's log; step_timeout_s and lost_after_s say how long to wait"
    return RefusedError(code, what, hint=hint)
