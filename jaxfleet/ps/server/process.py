"""A server process: network, metrics, signals, and the server itself."""

import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import FrameType

import numpy as np

from jaxfleet.env import read_metrics_host, read_metrics_port, read_restart
from jaxfleet.errors import StrategyError
from jaxfleet.ir import parse
from jaxfleet.lower import ExecutableCache, compute_in_place
from jaxfleet.observability import spans_of, write_token
from jaxfleet.observability.notices import notify
from jaxfleet.ps.server import Server, ServerCore, ServerOptions
from jaxfleet.ps.server.block_executor import BlockExecutor
from jaxfleet.ps.server.event_loop import DescriptorReserve, raise_descriptor_limit
from jaxfleet.ps.server.metrics import MetricsExporter, ServerMetrics
from jaxfleet.ps.server.program_loader import read_plan
from jaxfleet.transport.buffers import keep_freed_memory
from jaxfleet.transport.secret import metrics_token, read_secret
from jaxfleet.transport.zmq.network import ZmqNetwork

# How long the computing thread waits for the serving thread to release the GIL.
_SWITCH_S = 0.0002


# A server's program, of which nothing is kept but what JAX sets up at the first.
_SMALL = """\
program small {endpoints=["127.0.0.1:1"], pserver_id=0, trainers=1}
  data  g.trainer_0: f32[2]
  param w: f32[2]
  block 0
    rpc
      listen_and_serv(X=[g.trainer_0]) {grad_to_block_id=["g:1"], optimize_blocks=[^1]}
  block 1
    optimize
      Out=g: f32[2] = sum(X=[g.trainer_0])
      w = jax.sub(w, g)
"""


def prepare(*, computes: bool) -> None:
    """Does what every server does before it knows its job.

    Args:
        computes: runs a block, which sets the device and the compiler up.
    """
    keep_freed_memory()
    compute_in_place()
    if not computes:
        return
    plan = read_plan(parse(_SMALL), ExecutableCache())
    executor = BlockExecutor(plan)
    executor.compile()
    zeros = np.zeros(2, np.float32)
    executor.assign({"w": zeros})
    executor.run(plan.blocks[0], {"g.trainer_0": zeros})


def job_network(secret_file: Path | None) -> ZmqNetwork:
    """Returns the network of a job, with its secret if it has one."""
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
        options: the job, timeouts and checkpoints.
        secret_file: contains the job's secret.
        insecure: serve without one, on loopback only.
        begin: called with the server before it serves, to give it a program and a state.
        on_listening: called with the endpoint once trainers can connect.

    Raises:
        ConnectError: the endpoint is taken or may not be bound.
        CheckpointError: the server's last recovery checkpoint cannot be read.
        StrategyError: there is no secret and `insecure` is not set, or metrics cannot be served.
        JaxfleetError: a block failed, or no trainer is alive.
    """
    _check_secret(endpoint, secret_file, insecure=insecure)
    if options.save_dirs is None:
        options = replace(options, save_dirs=(Path.cwd(),))
    keep_freed_memory()
    compute_in_place()
    sys.setswitchinterval(_SWITCH_S)
    raise_descriptor_limit()
    with ExitStack() as opened:
        reserve = opened.enter_context(closing(DescriptorReserve()))
        network = job_network(secret_file)
        listener = opened.enter_context(closing(network.listen(endpoint)))
        cache = ExecutableCache()
        core = ServerCore(listener.endpoint, cache, time.monotonic, options)
        metrics, restarts = opened.enter_context(closing(MetricsExporter())), read_restart()

        def publish(newest: ServerMetrics) -> None:
            metrics.publish(replace(newest, job_restarts=restarts))

        begin(core)
        token_file = _give_metrics(metrics, core, options.server or 0, secret_file)
        if token_file is not None:
            opened.callback(token_file.unlink, missing_ok=True)
        stopping = threading.Event()

        def loop(core: ServerCore) -> Server:
            return Server(
                core,
                listener,
                connect=network.connect,
                publish=publish,
                spans=spans_of(f"server {options.server or 0}"),
                reserve=reserve,
                stopping=stopping,
            )

        server = loop(core)
        _stop_on_signals(server)
        on_listening(listener.endpoint)
        if core.step >= 0 and options.checkpoint_dir is not None:
            folder = options.checkpoint_dir / f"server{options.server}"
            notify(
                f"{core.outbox.name} goes on after step {core.step}, "
                f"from its checkpoint in {folder}"
            )
        code = server.serve()
        while (members := core.next_members) is not None and not stopping.is_set():
            core = ServerCore(listener.endpoint, cache, time.monotonic, options)
            core.expect(members)
            notify(f"{core.outbox.name} begins anew: the job has other servers now")
            code = loop(core).serve()
        publish(core.metrics(time.monotonic()))
        metrics.wait_for_scrape()
    if core.failure is not None:
        raise core.failure
    return code


def _check_secret(endpoint: str, secret_file: Path | None, *, insecure: bool) -> None:
    """Prevents opening a port to every user of the machine by mistake."""
    if secret_file is None and not insecure:
        what = f"the server at {endpoint} has no secret: every user who reaches its port could"
        raise StrategyError(
            f"{what} take the job over, and have it write files",
            hint="start the job with `jaxfleet launch`, which makes a secret; or set "
            "JAXFLEET_SECRET_FILE to the same file for all processes; or accept the risk with "
            "JAXFLEET_INSECURE=1",
        )


def _give_metrics(
    metrics: MetricsExporter, core: ServerCore, server: int, secret_file: Path | None
) -> Path | None:
    """Serves metrics if the environment specifies a port; with a secret, a token is required.

    Returns the file in which `jaxfleet top` of this user finds the token.
    """
    port = read_metrics_port(server)
    if port is None:
        return None
    token = None if secret_file is None else metrics_token(read_secret(secret_file))
    metrics.publish(core.metrics(time.monotonic()))
    metrics.start(read_metrics_host(), port, token)
    return None if token is None else write_token(port, token)


def _stop_on_signals(server: Server) -> None:
    if threading.current_thread() is not threading.main_thread():
        return

    def stop(_: int, __: FrameType | None) -> None:
        server.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
