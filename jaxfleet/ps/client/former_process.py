"""The lost process whose place a trainer takes, as the servers' welcomes describe it."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxfleet.errors import PeerLostError
from jaxfleet.ps.client.server_session import ServerSession
from jaxfleet.ps.client.trainer_identity import TrainerIdentity


@dataclass(frozen=True)
class FormerProcess:
    """What servers have of a lost process whose place this one takes.

    If trainers wait for each other, it had all results before the greatest step of its messages, so
    every server has applied the step before; and no server can have applied the step after, without
    its gradients. Pushes of rows have no answer, so a server may lack those of the step before:
    then none has applied the greatest step, and this process takes both again.

    In the relaxed modes servers apply each push on arrival. All that the former process sent up to
    step `applied` is on every server, and of later steps each server drops what it has: this
    process takes the last of the applied steps again, since the script may do more after it, such
    as save. Messages may merge steps, so those of this process have to end where messages of the
    former one ended.

    Attributes:
        seen: the greatest step of its messages.
        base: the step of the state that the job began with.
        applied: in the relaxed modes, the last of its steps that every server has applied.
        rows: in the others, the last step of which every server has its rows; None without tables.
    """

    seen: int
    base: int
    applied: int | None = None
    rows: int | None = None

    @property
    def done(self) -> int:
        """The step after which this process goes on; 0 if it begins like any other."""
        last = self.seen - 1 if self.applied is None else self.applied - 1
        if self.rows is not None:
            last = min(last, self.rows)
        return 0 if self.seen < self.base else max(last, self.base, 0)

    @property
    def has_begun(self) -> bool:
        """Whether it had the job's state, which this process then receives."""
        if self.applied is None:
            return self.done > 0
        return self.seen >= max(self.base, 1)

    def has_not_begun_after(self, step: int) -> bool:
        """Whether the process that goes on after this step has begun no other yet."""
        return self.has_begun and step == self.done

    def ended_at(self, step: int) -> bool:
        """Whether a message of the former process, with several steps, ended with this one."""
        return self.applied == step > self.base


def find_former(
    servers: Sequence[ServerSession], me: TrainerIdentity
) -> tuple[FormerProcess | None, list[int]]:
    """Returns the former process that servers know, and the servers that lack pushes of it.

    A server that was restarted has the pushes that its checkpoint includes, and those that the
    former process sent again before it was lost; only that process had the others. In the relaxed
    modes none of them lacks anything: this process goes on after what they have.

    Args:
        servers: welcomed by all.
        me: this trainer, some life of which was the former process.
    """
    seen = [known.seen for known in servers if known.seen is not None]
    base = max(known.base for known in servers)
    if not me.is_sync:
        seen += [known.step for known in servers if known.is_restored and me.life]
        applied = min((known.step for known in servers if known.takes_pushes), default=base)
        return FormerProcess(max(seen), base, applied) if seen else None, []
    if not seen:
        return None, [n for n, known in enumerate(servers) if known.is_restored] if me.life else []
    last = max(seen)
    came = [known.rows for known in servers if known.seen is not None and known.rows is not None]
    # A server that lacks more was restarted.
    former = FormerProcess(last, base, rows=min((n for n in came if n >= last - 2), default=None))
    has = [
        min(max(known.step, known.received), last if known.rows is None else known.rows)
        for known in servers
    ]
    return former, [n for n, step in enumerate(has) if step < former.done]


def lost_pushes_error(me: TrainerIdentity, server: int, step: int) -> PeerLostError:
    """Returns the error for a server that lacks pushes which only the former process had."""
    what = (
        f"{me.name} cannot return: {me.server_name(server)} was started again too, from its "
        f"checkpoint of step {step}, and lacks this trainer's later gradients"
    )
    return PeerLostError(what, hint="start the job again from its last checkpoint (step.restore)")
