"""Asks to join a job that runs, as one more trainer."""

from collections.abc import Callable, Mapping

from jaxfleet.errors import ConnectError, ProgramError
from jaxfleet.observability import LongWait
from jaxfleet.ps.membership import Membership
from jaxfleet.transport.messages import Connections, Kind, Message, Plain

STRANGER = "a process that is no trainer"  # the sender of its requests
_ASK_S = 0.5  # how often a process asks again that waits to join


def ask_first(
    lines: Connections,
    kind: Kind,
    body: Mapping[str, Plain],
    *,
    number: int,
    clock: Callable[[], float],
    within_s: float,
) -> Mapping[str, Plain] | None:
    """Asks server 0 without a hello; returns its answer, or None if none came.

    Raises:
        ProgramError: it refuses.
    """
    lines.send(0, Message(kind, STRANGER, number=number, body=body))
    until = clock() + within_s
    while (left_s := until - clock()) > 0:
        received = lines.receive(left_s)
        if received is None or received[1].number != number:
            continue
        answer = received[1]
        if answer.kind is Kind.ERROR:
            hint = answer.body.get("hint")
            raise ProgramError(str(answer.body.get("what")), hint=str(hint) if hint else None)
        return answer.body
    return None


def join_job(
    lines: Connections,
    *,
    job: str,
    session: str,
    digest: Callable[[int], str],
    clock: Callable[[], float],
    connect_s: float,
    silent_s: float | None = None,
    begins: bool = False,
    take_servers: Callable[[tuple[str, ...]], None] = lambda _: None,
    has_ended: Callable[[], bool] = lambda: False,
) -> Membership | None:
    """Waits until a job has this process as a member, which happens at a step.

    Returns None if it is to begin the job instead.

    Args:
        lines: connections to its servers.
        job: its name.
        session: identifies this process.
        digest: returns the hash of its programs for a number of trainers.
        clock: the time in seconds.
        connect_s: within how many seconds server 0 answers first.
        silent_s: how long it may be silent then; by default as long.
        begins: it was one of the first trainers, and begins the job if that has not begun.
        take_servers: called with the servers that the job has, before `digest`.
        has_ended: whether the job has ended, so that server 0 answers no more.

    Raises:
        ConnectError: server 0 does not answer.
        ProgramError: the job's trainers cannot change, or run another program.
    """
    count, program, number, heard, limit_s = 0, "", 0, clock(), connect_s
    servers: list[Plain] = []
    wait = LongWait(clock)
    while True:
        number += 1
        body: dict[str, Plain] = {"job": job, "session": session, "trainers": count}
        if servers:
            body["servers"] = servers
        answer = ask_first(
            lines, Kind.JOIN, {**body, "program": program},
            number=number, clock=clock, within_s=2 * _ASK_S,
        )  # fmt: skip
        if answer is None:
            if has_ended():
                what = f"job '{job}' ended before this process could join it"
                raise ConnectError(what, hint="its result lacks nothing")
            wait.look(lambda: f"waits for server 0, to join job '{job}'")
            if clock() - heard > limit_s:
                what = f"server 0 does not answer for {limit_s:.0f} s"
                raise ConnectError(what, hint="a process joins a job that runs")
            continue
        heard, limit_s = clock(), connect_s if silent_s is None else silent_s
        before, found = servers, answer.get("servers")
        if isinstance(found, list) and found != servers:
            servers = found
            take_servers(tuple(map(str, servers)))
        membership = Membership.of(answer)
        if membership is not None and membership.number_of(session) is not None:
            return membership
        now = answer.get("trainers")
        if now == 0 and begins and not count:
            return None
        if isinstance(now, int) and now and (now != count or servers != before):
            count, program = now, digest(now)
            heard = clock()
            continue
        wait.look(lambda: f"waits to join job '{job}' at a step")
        _pause(lines, clock, _ASK_S)


def _pause(lines: Connections, clock: Callable[[], float], seconds: float) -> None:
    until = clock() + seconds
    while (left_s := until - clock()) > 0:
        lines.receive(left_s)
