"""A client of the servers of a job over the network, with heartbeats."""

from collections.abc import Sequence

from jaxfleet.observability import Spans
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.heartbeat import Heartbeat
from jaxfleet.ps.client.trainer_identity import TrainerIdentity
from jaxfleet.ps.timeouts import Timeouts
from jaxfleet.transport.zmq.network import ZmqNetwork

_BEATS = 5  # heartbeats that may be lost before a peer is, at least
_MOST_BETWEEN_BEATS_S = 1.0


def job_heartbeat(
    network: ZmqNetwork, endpoints: Sequence[str], *, sender: str, session: str, lost_s: float
) -> Heartbeat:
    """Starts the heartbeats of a process of a job.

    Args:
        network: the job's.
        endpoints: those of the servers.
        sender: the process's name.
        session: by which servers identify it.
        lost_s: seconds without a heartbeat after which it is lost.
    """
    return Heartbeat(
        network.connecting_anew_after(lost_s / 3, doubles=False),
        endpoints,
        sender=sender,
        session=session,
        every_s=min(_MOST_BETWEEN_BEATS_S, lost_s / _BEATS),
    )


def connected_client(
    network: ZmqNetwork,
    me: TrainerIdentity,
    timeouts: Timeouts,
    *,
    replay_bytes: int = 0,
    spans: Spans,
) -> Client:
    """Returns a client that connects to the servers, and starts its heartbeats.

    A connection on which data gets lost is replaced before a peer counts as lost: servers lose a
    trainer whose heartbeats do not arrive, so theirs is replaced sooner than that of requests.

    Args:
        network: the job's.
        me: this trainer, and the servers' endpoints.
        timeouts: the job's.
        replay_bytes: as for `Client`.
        spans: records what the client waits for.
    """
    lost_s = timeouts.lost_after_s
    heartbeat = job_heartbeat(
        network, me.endpoints, sender=me.name, session=me.session, lost_s=lost_s
    )
    return Client(
        network.connecting_anew_after(lost_s).connect(me.endpoints),
        me,
        timeouts=timeouts,
        heartbeat=heartbeat,
        replay_bytes=replay_bytes,
        spans=spans,
    )
