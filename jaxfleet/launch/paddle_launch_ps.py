"""`python -m jaxfleet.launch_ps`: `python -m paddle.distributed.launch_ps`, with its arguments.

Servers and workers all run the script, on this machine. Unlike the original, which starts nothing
unless it prints its arguments and reports success whatever its workers do, it always starts the
job and returns its status.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxfleet.env import read_job
from jaxfleet.launch.job_spec import Job
from jaxfleet.launch.paddle_launch import add_common, run_as_command, script_command, tell
from jaxfleet.launch.pserver_launch import launch as launch_job

_LOGS = {"server": "serverlog", "trainer": "workerlog"}


def launch(argv: Sequence[str] | None = None, *, runner: tuple[str, ...] = ()) -> int:
    """Runs a script as its arguments specify; returns the exit status of the first failure."""
    args = _parser().parse_args(argv)
    if args.print_config:
        tell(args)
    if args.cluster_node_ips != args.node_ip:
        what = "launch_ps starts all processes on this machine"
        sys.stderr.write(f"{what}; for several there is jaxfleet launch --nodes\n")
    command = script_command(args, runner)
    job = Job(
        trainer=command,
        server=command,
        trainers=args.worker_num,
        servers=args.server_num,
        port=args.start_port,
        server_endpoints=tuple(word.strip() for word in args.endpoints.split(",") if word.strip()),
        log_dir=args.log_dir,
        secret_file=read_job().secret_file,
        restarts=0,
        trainers_done="all workers exit, going to finish parameter server",
    )
    status = launch_job(job, logs=lambda role, at: f"{_LOGS[role]}.{at}")
    if status == 0:
        sys.stderr.write("all parameter server are killed\n")
    return status


def main(argv: Sequence[str] | None = None, *, runner: tuple[str, ...] = ()) -> int:
    """Like `launch`, but prints errors in the arguments."""
    return run_as_command(partial(launch, runner=runner), argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxfleet.launch_ps",
        description="Runs a script as parameter servers and workers on this machine. "
        "jaxfleet launch --servers-run-script has more to choose.",
        allow_abbrev=False,
    )
    add: Any = parser.add_argument
    add("--start_port", type=int, default=6170, metavar="P", help="of the first server")
    add("--endpoints", default="", metavar="A:P,B:P", help="of servers, if not by --start_port")
    add("--worker_num", type=int, default=2, metavar="N", help="how many workers")
    add("--server_num", type=int, default=2, metavar="N", help="how many servers")
    add(
        "--log_dir",
        type=Path,
        default=Path("logs"),
        metavar="DIR",
        help="serverlog.N and workerlog.N go there",
    )
    add_common(parser)
    return parser
