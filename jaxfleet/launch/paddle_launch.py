"""`python -m jaxfleet.launch`: `python -m paddle.distributed.launch`, argument by argument.

A process for each GPU of each machine, or one for each machine where there is none.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxfleet.env import CloudNodes, read_cloud_nodes, read_job
from jaxfleet.errors import AssertedError
from jaxfleet.launch.collective import launch_ranks
from jaxfleet.launch.gpus import seen_gpus, selected_gpus
from jaxfleet.launch.job import CollectiveJob
from jaxfleet.launch.nodes import Nodes
from jaxfleet.launch.paddle_arguments import add_common, run_as_command, script_command, tell

_FIRST_PORT = 6070
_FIRST_PORT_OF_CLOUD = 6170
_INFO = 20  # as `logging` counts
_INSECURE = (
    "launch: this job on several machines runs without a secret: whoever reaches its ports can "
    "take part; set JAXFLEET_SECRET_FILE to a file with the same content on each\n"
)


def launch(argv: Sequence[str] | None = None, *, runner: tuple[str, ...] = ()) -> int:
    """Runs a script as its arguments say; returns 1 where a process failed.

    Args:
        argv: the words after the module's name; those of this process unless given.
        runner: what Python is given before the script, such as `-m jaxfleet.compat`.

    Raises:
        AssertionError: the machines, or the GPUs, are not as they have to be.
    """
    args = _parser().parse_args(argv)
    if args.print_config:
        tell(args)
    place, secret_file = _place(args), read_job().secret_file
    insecure = place.nodes.several and secret_file is None
    if insecure:
        sys.stderr.write(_INSECURE)
    gpus = seen_gpus() if args.selected_gpus is None else selected_gpus(args.selected_gpus)
    job = CollectiveJob(
        command=script_command(args, runner),
        name=place.nodes.job_name,
        nodes=place.nodes,
        port=place.port(args, max(1, len(gpus))),
        nproc=max(1, len(gpus)),
        gpus=gpus or None,
        log_dir=args.log_dir,
        secret_file=secret_file,
        # The original has no secret, and its arguments name none; JAXFLEET_SECRET_FILE does.
        insecure=insecure,
        quiet=args.log_level > _INFO,
        proxies=False,
    )
    return 1 if launch_ranks(job, logs=lambda _, rank: f"workerlog.{rank}") else 0


def main(argv: Sequence[str] | None = None, *, runner: tuple[str, ...] = ()) -> int:
    """Does as `launch`, and prints what is wrong with the arguments."""
    return run_as_command(partial(launch, runner=runner), argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxfleet.launch",
        description="Runs a script as ranks: one for each GPU of each machine, or one for each "
        "machine without. jaxfleet launch --nproc has more to choose.",
        allow_abbrev=False,
    )
    add: Any = parser.add_argument
    add("--use_paddlecloud", action="store_true", help="read the machines from the environment")
    add("--started_port", type=int, metavar="P", help=f"the first port; free ones unless given, "
        f"{_FIRST_PORT} on several machines")  # fmt: skip
    add("--selected_gpus", metavar="0,1", help="the GPUs; all unless given")
    add("--log_level", type=int, default=_INFO, metavar="N", help="above 20: only failures")
    add(
        "--log_dir",
        type=Path,
        metavar="DIR",
        help="write each process's output to DIR/workerlog.N too",
    )
    add_common(parser)
    return parser


@dataclass(frozen=True)
class _Place:
    """Says on which machines a job runs.

    Attributes:
        nodes: the machines.
        cloud: what PaddleCloud said of them, if it was asked.
    """

    nodes: Nodes
    cloud: CloudNodes | None = None

    def port(self, args: argparse.Namespace, count: int) -> int:
        """Returns the first of a machine's ports, 0 where free ones are to be found."""
        asked: int = args.started_port or 0
        if self.cloud is None:
            return asked or (_FIRST_PORT if self.nodes.several else 0)
        if self.nodes.several and self.cloud.port is not None and self.cloud.ports >= count:
            return self.cloud.port
        return asked or _FIRST_PORT_OF_CLOUD


def _place(args: argparse.Namespace) -> _Place:
    cloud = read_cloud_nodes() if args.use_paddlecloud else None
    if cloud is None or cloud.count == 1:
        names = tuple(name.strip() for name in args.cluster_node_ips.split(","))
        return _Place(_nodes(names, args.node_ip))
    names, own = cloud.names or (), cloud.own or ""
    for name, value in (
        ("PADDLE_TRAINERS", names),
        ("POD_IP", own),
        ("PADDLE_TRAINER_ID", "" if cloud.rank is None else "set"),
    ):
        if not value:
            hint = "PaddleCloud sets it; without --use_paddlecloud, --cluster_node_ips is read"
            raise AssertedError(f"environment variable {name} is not set", hint=hint)
    for asked, found in ((args.cluster_node_ips, ",".join(names)), (args.node_ip, own)):
        if asked not in {"127.0.0.1", found}:
            sys.stderr.write(f"PaddleCloud says {found}, which is used instead of {asked}\n")
    return _Place(_nodes(names, own), cloud)


def _nodes(names: tuple[str, ...], own: str) -> Nodes:
    if own not in names:
        hint = "--node_ip is this machine's, as it stands in --cluster_node_ips"
        raise AssertedError(f"this machine, {own}, is none of {', '.join(names)}", hint=hint)
    return Nodes(names, own)
