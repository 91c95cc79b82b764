"""`initialize`: makes this process a rank of the group that its environment names."""

import math
import socket
from dataclasses import dataclass

import jax

from jaxfleet.env import Rank, read_job, read_rank
from jaxfleet.errors import ConnectError, StrategyError
from jaxfleet.group.center import Center
from jaxfleet.group.clusters import detected_rank
from jaxfleet.group.leaving import guard, leave_at_exit
from jaxfleet.group.member import Member
from jaxfleet.group.membership import Joined
from jaxfleet.group.relay import Relay
from jaxfleet.group.serving import Serving
from jaxfleet.ps.secret import read_secret
from jaxfleet.ps.zmq_network import ZmqNetwork
from jaxfleet.watch import spans_of
from jaxfleet.watch.notices import alert

_SHUTDOWN_S = 60
# jax's own heartbeat aborts the process, so ours must always be first.
_NEVER_S = 10_000_000
_PATIENCE_S = 600.0  # unless a strategy's step_timeout_s says otherwise

_joined: list[Joined] = []  # a process joins once and for all, as jax does


@dataclass(frozen=True)
class Place:
    """Says which process of how many this is.

    Attributes:
        rank: from 0.
        size: how many there are; 1 where this process is alone.
    """

    rank: int = 0
    size: int = 1


def initialize(
    rank: Rank | None = None, *, connect_s: float = 120.0, lost_after_s: float = 10.0
) -> Place:
    """Joins the group of processes that the environment names; alone, it does nothing.

    It is called before anything else of jax. The environment is what `jaxfleet launch` sets
    (`PADDLE_TRAINER_ENDPOINTS`, `PADDLE_TRAINER_ID`), or SLURM, Open MPI and Kubernetes, as jax
    detects them. A second call does nothing.

    Args:
        rank: in place of what the environment says.
        connect_s: the most seconds until all processes have come.
        lost_after_s: a process that is not heard of for so many seconds is lost to the others.

    Returns:
        Which process of how many this is.

    Raises:
        ConnectError: somebody did not come in time; it names who.
        StrategyError: the environment contradicts itself, a time is none, or jax has started
            before.
    """
    if _joined:
        return Place(_joined[0].rank, _joined[0].size)
    for name, seconds in (("connect_s", connect_s), ("lost_after_s", lost_after_s)):
        if not 0 < seconds < math.inf:
            what = f"jf.initialize: {name} is {seconds}, but must be a positive number of seconds"
            raise StrategyError(what)
    here = rank or read_rank() or detected_rank(connect_s)
    if here is None or len(here.endpoints) == 1:
        return Place()
    _check_not_started()
    joined = _meet(here, connect_s=connect_s, lost_after_s=lost_after_s)
    joined.patience_s = _PATIENCE_S
    _joined.append(joined)
    leave_at_exit(joined)
    return Place(joined.rank, joined.size)


def has_started() -> bool:
    """Tells whether jax knows its devices already."""
    # The one public setting that jax refuses to change once it has started; it stays what it was.
    count: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]  # jax makes it up
    try:
        jax.config.update("jax_num_cpu_devices", abs(count) + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


def joined() -> Joined | None:
    """Returns this process as a rank of its group; None where it is alone."""
    return _joined[0] if _joined else None


def _meet(here: Rank, *, connect_s: float, lost_after_s: float) -> Joined:
    first, size = here.endpoints[0], len(here.endpoints)
    job = f"{here.job}, start {here.restart}" if here.restart else here.job
    secret = None if here.secret_file is None else read_secret(here.secret_file)
    # Without a secret it listens beyond this machine all the same: as jax and gloo do.
    network = ZmqNetwork(secret=secret, share_memory=False, anywhere=True)
    host = first.rpartition(":")[0]
    held, serving = None, None
    if here.rank == 0:
        if secret is None and not read_job().insecure:
            _warn_of_no_secret(first)
        listener = network.listen(first)
        held = _held_port()
        coordinator = f"{host}:{held.getsockname()[1]}"
        center = Center(size, job, coordinator, lost_after_s=lost_after_s)
        serving = Serving(center, listener)
    member = Member(network, first, rank=here.rank, size=size, job=job, lost_after_s=lost_after_s)
    joined = Joined(member, serving, spans_of(f"rank {here.rank}"))
    guard(joined)
    try:
        coordinator = member.meet(connect_s)
        _start_jax(coordinator, here, connect_s)
    except BaseException:
        joined.close()
        raise
    finally:
        if held is not None:
            held.close()
    return joined


def _warn_of_no_secret(endpoint: str) -> None:
    alert(
        f"rank 0 listens at {endpoint} without a secret: whoever reaches that port can take a "
        "rank's place, or end the job. Give all ranks one file (`umask 077; head -c 32 "
        "/dev/urandom > FILE`, in a folder that all of them see) by JAXFLEET_SECRET_FILE=FILE; "
        "JAXFLEET_INSECURE=1 accepts the risk"
    )


def _start_jax(coordinator: str, here: Rank, connect_s: float) -> None:
    rank, size = here.rank, len(here.endpoints)
    host, _, port = coordinator.rpartition(":")
    local = host in {"localhost", "127.0.0.1", "[::1]"}
    address = coordinator
    if rank:
        address = Relay(host.strip("[]"), int(port), connect_s=connect_s).address
    # jax would take SIGTERM for the notice that a machine is about to be taken away, and live on.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            address,
            size,
            rank,
            local_device_ids=here.gpus or None,
            cluster_detection_method="deactivate",
            initialization_timeout=max(1, round(connect_s)),
            heartbeat_timeout_seconds=_NEVER_S,
            shutdown_timeout_seconds=_SHUTDOWN_S,
            coordinator_bind_address=coordinator if local else None,
        )
        jax.devices()  # here every rank waits for the devices of all
    except RuntimeError as error:
        what = f"rank {rank} of {size} could not start jax with the others: {error}"
        raise ConnectError(what) from error


def _check_not_started() -> None:
    """Refuses to join once jax knows its devices: it would not look for those of others again."""
    if has_started():
        what = "jf.initialize: jax has started in this process, with this process's devices alone"
        hint = "call jf.initialize() first: before jax.devices(), before the first array is made"
        raise StrategyError(what, hint=hint)


def _held_port() -> socket.socket:
    """Returns a free port, held so that nobody else gets it until jax listens there."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("", 0))
    return held
