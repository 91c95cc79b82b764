"""Runs a server process: a network, a server, and its end."""

import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import FrameType

from jaxfleet.env import read_metrics_host, read_metrics_port
from jaxfleet.errors import StrategyError
from jaxfleet.lower import ExecutableCache, compute_in_place
from jaxfleet.ps.allocation import keep_freed_memory
from jaxfleet.ps.descriptors import Reserve, raise_limit
from jaxfleet.ps.metrics import Metrics
from jaxfleet.ps.network import Network
from jaxfleet.ps.secret import metrics_token, read_secret
from jaxfleet.ps.server import Server, ServerCore, ServerOptions
from jaxfleet.ps.zmq_network import ZmqNetwork
from jaxfleet.watch import spans_of, write_token
from jaxfleet.watch.notices import notify

# The thread that computes waits this long for the one that serves to let the interpreter go.
_SWITCH_S = 0.0002


def network_of(secret_file: Path | None) -> Network:
    """Returns the network of a job, with its secret where it has one."""
    return ZmqNetwork(secret=None if secret_file is None else read_secret(secret_file))


def serve(
    endpoint: str,
    options: ServerOptions,
    *,
    secret_file: Path | None = None,
    insecure: bool = False,
    begin: Callable[[ServerCore], None] = lambda _: None,
    on_listening: Callable[[str], None] = lambda _: None,
) -> int:
    """Serves a job until it ends; returns the process's exit code.

    Args:
        endpoint: where to listen.
        options: which job, how long to wait, where to keep the state.
        secret_file: holds the job's secret.
        insecure: serve without one, on loopback only.
        begin: is given the server before it serves: to give it a program and a state.
        on_listening: is given the endpoint once trainers can connect.

    Raises:
        ConnectError: the endpoint is taken, or may not be bound.
        CheckpointError: the server's last own checkpoint cannot be read.
        StrategyError: there is no secret and `insecure` is not set, or metrics are asked for and
            cannot be served.
        JaxfleetError: a block failed, or no trainer lives.
    """
    _check_secret(endpoint, secret_file, insecure=insecure)
    if options.save_dirs is None:
        options = replace(options, save_dirs=(Path.cwd(),))
    keep_freed_memory()
    compute_in_place()
    sys.setswitchinterval(_SWITCH_S)
    raise_limit()
    with ExitStack() as opened:
        reserve = opened.enter_context(closing(Reserve()))
        network = network_of(secret_file)
        listener = opened.enter_context(closing(network.listen(endpoint)))
        core = ServerCore(listener.endpoint, ExecutableCache(), time.monotonic, options)
        metrics = opened.enter_context(closing(Metrics()))
        begin(core)
        token_file = _give_metrics(metrics, core, options.server or 0, secret_file)
        if token_file is not None:
            opened.callback(token_file.unlink, missing_ok=True)
        server = Server(
            core,
            listener,
            connect=network.connect,
            publish=metrics.publish,
            spans=spans_of(f"server {options.server or 0}"),
            reserve=reserve,
        )
        _stop_on_signals(server)
        on_listening(listener.endpoint)
        if core.step >= 0 and options.checkpoint_dir is not None:
            folder = options.checkpoint_dir / f"server{options.server}"
            notify(
                f"{core.desk.name} goes on after step {core.step}, from its checkpoint in {folder}"
            )
        code = server.serve()
    if core.failure is not None:
        raise core.failure
    return code


def _check_secret(endpoint: str, secret_file: Path | None, *, insecure: bool) -> None:
    """Refuses to open a port to every user of the machine by mistake.

    Raises:
        StrategyError: there is no secret, and `insecure` is not set.
    """
    if secret_file is None and not insecure:
        what = f"the server at {endpoint} has no secret: every user who reaches its port could"
        raise StrategyError(
            f"{what} take the job over, and have it write files",
            hint="start the job with `jaxfleet launch`, which makes a secret; or set "
            "JAXFLEET_SECRET_FILE to the same file for all processes; or accept the risk with "
            "JAXFLEET_INSECURE=1",
        )


def _give_metrics(
    metrics: Metrics, core: ServerCore, server: int, secret_file: Path | None
) -> Path | None:
    """Serves metrics if the environment names a port; with a secret, a token is required.

    Returns:
        The file in which `jaxfleet top` of this user finds the token.
    """
    port = read_metrics_port(server)
    if port is None:
        return None
    token = None if secret_file is None else metrics_token(read_secret(secret_file))
    metrics.publish(core.figures(time.monotonic()))
    metrics.start(read_metrics_host(), port, token)
    return None if token is None else write_token(port, token)


def _stop_on_signals(server: Server) -> None:
    """Makes an interrupt or a termination end the server in good order."""
    if threading.current_thread() is not threading.main_thread():
        return

    def stop(_: int, __: FrameType | None) -> None:
        server.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
