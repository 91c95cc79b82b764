"""The lost process whose place a trainer takes, as the servers' welcomes describe it."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxfleet.errors import PeerLostError
from jaxfleet.ps.client.server_session import ServerSession
from jaxfleet.ps.client.trainer_identity import TrainerIdentity


@dataclass(frozen=True)
class FormerProcess:
    """What servers have of a lost process whose place this one takes.

    It had all results before the greatest step of its messages, so every server has applied the
    step before; and no server can have applied the step after, without its gradients.

    Attributes:
        seen: the greatest step of its messages.
        base: the step of the state that the job began with.
    """

    seen: int
    base: int

    @property
    def done(self) -> int:
        """The step after which this process goes on; 0 if it begins like any other."""
        return 0 if self.seen < self.base else max(self.seen - 1, self.base, 0)


def find_former(
    servers: Sequence[ServerSession], *, life: int
) -> tuple[FormerProcess | None, list[int]]:
    """Returns the former process that servers know, and the servers that lack pushes of it.

    A server that was restarted has the pushes that its checkpoint includes, and those that the
    former process sent again before it was lost; only that process had the others.

    Args:
        servers: welcomed by all.
        life: how often this trainer was started before.
    """
    seen = [known.seen for known in servers if known.seen is not None]
    if not seen:
        return None, [n for n, known in enumerate(servers) if known.is_restored] if life else []
    former = FormerProcess(max(seen), max(known.base for known in servers))
    has = [max(known.step, known.received) for known in servers]
    return former, [n for n, step in enumerate(has) if step < former.done]


def lost_pushes_error(me: TrainerIdentity, server: int, step: int) -> PeerLostError:
    """Returns the error for a server that lacks pushes which only the former process had."""
    what = (
        f"{me.name} cannot return: {me.server_name(server)} was started again too, from its "
        f"checkpoint of step {step}, and lacks this trainer's later gradients"
    )
    return PeerLostError(what, hint="start the job again from its last checkpoint (step.restore)")
