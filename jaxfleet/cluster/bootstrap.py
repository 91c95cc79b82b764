"""`initialize`: joins this process to its group, which it leaves at its exit."""

import atexit
import faulthandler
import math
import os
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

import jax

from jaxfleet.cluster.coordinator import Coordinator, CoordinatorThread
from jaxfleet.cluster.coordinator_client import CoordinatorClient
from jaxfleet.cluster.jax_coordinator_relay import Relay
from jaxfleet.cluster.process_group import ProcessGroup
from jaxfleet.env import Rank, read_job, read_rank, read_restart
from jaxfleet.errors import ConnectError, JaxfleetError, StrategyError
from jaxfleet.observability import spans_of
from jaxfleet.observability.notices import alert
from jaxfleet.strategy import DistributedStrategy
from jaxfleet.transport.secret import read_secret
from jaxfleet.transport.zmq.network import ZmqNetwork

_SHUTDOWN_S = 60
# jax's own heartbeat aborts the process, so ours must always be first.
_NEVER_S = 10_000_000
_PATIENCE_S = DistributedStrategy.step_timeout_s  # unless a strategy sets it

_joined: list[ProcessGroup] = []  # a process joins only once, as in jax


@dataclass(frozen=True)
class RankPlace:
    """Rank of this process and size of its group."""

    rank: int = 0  # from 0
    size: int = 1  # the number of ranks; 1 if this process is alone


def initialize(
    rank: Rank | None = None,
    *,
    connect_s: float = DistributedStrategy.connect_s,
    lost_after_s: float = DistributedStrategy.lost_after_s,
) -> RankPlace:
    """Joins the group of processes that the environment specifies; does nothing if there is none.

    Must run before any other use of jax. The environment is the one that `jaxfleet launch` sets
    (`PADDLE_TRAINER_ENDPOINTS`, `PADDLE_TRAINER_ID`), or that of SLURM, Open MPI or Kubernetes, as
    jax detects them. A second call does nothing.

    Args:
        rank: overrides the rank from the environment.
        connect_s: the longest wait for all processes to arrive.
        lost_after_s: a process that stays silent this long counts as lost.

    Returns:
        Rank and size.

    Raises:
        ConnectError: some processes did not arrive in time; the message names them.
        StrategyError: the environment contradicts itself, a time is not positive, or jax has
            already started.

    Examples:
        A process that no launcher started is alone:

        >>> import jaxfleet as jf
        >>> jf.initialize()
        RankPlace(rank=0, size=1)
    """
    if _joined:
        return RankPlace(_joined[0].rank, _joined[0].size)
    for name, seconds in (("connect_s", connect_s), ("lost_after_s", lost_after_s)):
        if not 0 < seconds < math.inf:
            what = f"jf.initialize: {name} is {seconds}, but must be a positive number of seconds"
            raise StrategyError(what)
    here = rank or read_rank() or detected_rank(connect_s)
    if here is None or len(here.endpoints) == 1:
        return RankPlace()
    _check_not_started()
    joined = _meet(here, connect_s=connect_s, lost_after_s=lost_after_s)
    joined.patience_s = _PATIENCE_S
    _joined.append(joined)
    leave_at_exit(joined)
    return RankPlace(joined.rank, joined.size)


def has_started() -> bool:
    """Whether jax has already enumerated its devices."""
    # The one public setting that jax refuses to change after its start; its value stays the same.
    count: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined, unused-ignore]  # jax 0.10 makes it up
    try:
        jax.config.update("jax_num_cpu_devices", abs(count) + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


def joined() -> ProcessGroup | None:
    """Returns this process as a rank of its group; None if it is alone."""
    return _joined[0] if _joined else None


def _meet(here: Rank, *, connect_s: float, lost_after_s: float) -> ProcessGroup:
    first, size = here.endpoints[0], len(here.endpoints)
    job = f"{here.job}, start {here.restart}" if here.restart else here.job
    secret = None if here.secret_file is None else read_secret(here.secret_file)
    # Listens beyond this machine even without a secret, as jax and gloo do.
    network = ZmqNetwork(secret=secret, share_memory=False, anywhere=True)
    host = first.rpartition(":")[0]
    held, serving = None, None
    if here.rank == 0:
        if secret is None and not read_job().insecure:
            warn_of_no_secret(first)
        listener = network.listen(first)
        held = _held_port()
        coordinator = f"{host}:{held.getsockname()[1]}"
        of_ranks = Coordinator(size, job, coordinator, lost_after_s=lost_after_s)
        serving = CoordinatorThread([of_ranks], listener)
    member = CoordinatorClient(
        network.connecting_anew_after(lost_after_s / 3),
        first,
        rank=here.rank,
        size=size,
        job=job,
        lost_after_s=lost_after_s,
    )
    joined = ProcessGroup(member, serving, spans_of(f"rank {here.rank}"))
    guard(joined)
    try:
        joined.metrics.serve(here, secret)
        coordinator = member.meet(connect_s)
        _start_jax(coordinator, here, connect_s)
    except BaseException:
        joined.close()
        raise
    finally:
        if held is not None:
            held.close()
    return joined


def warn_of_no_secret(endpoint: str, who: str = "rank 0") -> None:
    """Warns that any process that can reach the address can take part."""
    alert(
        f"{who} listens at {endpoint} without a secret: whoever reaches that port can take a "
        "process's place, or end the job. Give all processes one file (`umask 077; head -c 32 "
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
    # jax would treat SIGTERM as a preemption notice and keep running.
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
        jax.devices()  # every rank waits here for the devices of all
    except RuntimeError as error:
        what = f"rank {rank} of {size} could not start jax with the others: {error}"
        raise ConnectError(what) from error


def _check_not_started() -> None:
    """Raises if jax already knows its devices: it would not look for those of other ranks again."""
    if has_started():
        what = "jf.initialize: jax has started in this process, with this process's devices alone"
        hint = "call jf.initialize() first: before jax.devices(), before the first array is made"
        raise StrategyError(what, hint=hint)


def _held_port() -> socket.socket:
    """Returns a free port, held until jax listens on it so that no other process takes it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("", 0))
    return held


def detected_rank(connect_s: float) -> Rank | None:
    """Returns the rank that SLURM, Open MPI or Kubernetes specify; None outside of them.

    `jax.distributed.initialize` detects them but does not report the result, so this queries jax's
    own classes. They provide only the first endpoint, the rendezvous.

    Raises:
        StrategyError: one of them is present but does not specify the rank.
    """
    try:
        from jax._src.clusters import ClusterEnv  # noqa: PLC0415  # there is no public API

        detect = ClusterEnv.auto_detect_unset_distributed_params
    except (ImportError, AttributeError):  # a jax that has them elsewhere
        return None
    try:
        found: Any = detect(None, None, None, None, None, round(connect_s))
    except Exception as error:  # unset variables and failed queries raise errors of many types
        what = "a cluster started this process, and jax does not find out which one it is: "
        hint = "set PADDLE_TRAINER_ENDPOINTS and PADDLE_TRAINER_ID, or unset what the cluster set"
        raise StrategyError(f"{what}{type(error).__name__}: {error}", hint=hint) from error
    first, size, rank, devices = found
    if first is None or size is None or rank is None:
        return None
    job = read_job()
    endpoints = (first, *[""] * (size - 1))
    return Rank(rank, endpoints, job.name, job.secret_file, read_restart(), tuple(devices or ()))


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
    try:
        joined.metrics.end(is_failed=True)
        joined.close()
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:  # noqa: BLE001  # the process ends all the same
        traceback.print_exc()
    finally:
        os._exit(_FAILED)
