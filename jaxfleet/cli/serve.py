"""`jaxfleet serve`: runs one parameter server of a job; `jaxfleet launch` starts it."""

import argparse
import json
import os
import sys
from typing import Any

from jaxfleet.env import PserverRole, enter_environment, read_cluster
from jaxfleet.errors import ConnectError, StrategyError
from jaxfleet.launch import PORT_TAKEN
from jaxfleet.launch.placement import seen_gpus


def add_parser(commands: Any, about: str) -> None:
    """Adds the command and its arguments; `about` is its line in the list of commands."""
    parser = commands.add_parser(
        "serve",
        help=about,
        description="Runs one parameter server. Its place in the job is read from the environment "
        "(TRAINING_ROLE=PSERVER, PADDLE_PSERVERS_IP_PORT_LIST, PADDLE_CURRENT_ENDPOINT, "
        "PADDLE_TRAINERS_NUM); it gets its program from the trainers.",
    )
    add = parser.add_argument
    of_job = "; as in the trainers' strategy unless both are given"
    add("--lost-after", type=float, metavar="S", help=f"seconds without a heartbeat{of_job}")
    add("--step-timeout", type=float, metavar="S", help=f"seconds for a step at most{of_job}")
    insecure = "start without a secret: whoever reaches the port can take part in the job"
    add("--insecure", action="store_true", help=f"{insecure} (JAXFLEET_INSECURE=1)")
    add("--standby", type=int, metavar="FD", help="be a spare: import everything, then read the "
        "environment of a server as JSON from this descriptor, and take its place")  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serves until the job ends."""
    if args.standby is not None and not _stand_by(args.standby):
        return 0
    cluster = read_cluster()
    if cluster is None or cluster.role != "pserver" or cluster.current_endpoint is None:
        what = "this process is not a server of a job"
        raise StrategyError(what, hint="set TRAINING_ROLE=PSERVER, or use jaxfleet launch")
    try:
        return _serve(cluster, args)
    except ConnectError as error:
        print(
            f"jaxfleet: {error}",
            *getattr(error, "__notes__", ()),
            sep="\n",
            file=sys.stderr,
            flush=True,
        )
        return PORT_TAKEN


def _stand_by(descriptor: int) -> bool:
    """Prepares a server, and waits for its role; returns False if it is not needed."""
    from jaxfleet.ps.server.process import prepare  # noqa: PLC0415  # jax

    with os.fdopen(descriptor, "rb") as pipe:
        # A device other than the CPU is left to those who use it: JAX would take its memory.
        prepare(computes=not seen_gpus())
        role = pipe.read()
    if not role:
        return False
    enter_environment(json.loads(role))
    return True


def _serve(cluster: PserverRole, args: argparse.Namespace) -> int:
    from jaxfleet.ps.server import ServerOptions  # noqa: PLC0415
    from jaxfleet.ps.server.process import serve  # noqa: PLC0415  # jax, which the other commands do without

    times = {"lost_after_s": args.lost_after, "step_timeout_s": args.step_timeout}
    given = {name: seconds for name, seconds in times.items() if seconds is not None}
    options = ServerOptions(
        server=cluster.server_id,
        job=cluster.job,
        launch_id=cluster.launch_id,
        trainers=cluster.trainers,
        as_trainers_say=len(given) < len(times),
        server_return_s=cluster.server_return_s,
        checkpoint_dir=cluster.own_checkpoints,
        save_dirs=cluster.save_dirs or None,
        **given,
    )
    assert cluster.current_endpoint is not None
    return serve(
        cluster.current_endpoint,
        options,
        secret_file=cluster.secret_file,
        insecure=cluster.insecure or args.insecure,
        on_listening=lambda endpoint: print(
            f"serving at {endpoint}, process {os.getpid()}", flush=True
        ),
    )
