"""`python -m jaxfleet.launch`: the arguments of `python -m paddle.distributed.launch`.

One process per GPU of each machine, or one per machine without GPUs.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxfleet.env import CloudNodes, read_cloud_nodes, read_job
from jaxfleet.errors import AssertedError, JaxfleetError, ProgramError
from jaxfleet.launch.job_spec import CollectiveJob, Nodes
from jaxfleet.launch.placement import seen_gpus, selected_gpus
from jaxfleet.launch.rank_launch import launch_ranks

_FALSE = frozenset({"", "0", "false", "no", "off", "none"})
_USER_ERROR = 2


def add_common(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments common to both commands, the script last."""
    add: Any = parser.add_argument
    add("--cluster_node_ips", default="127.0.0.1", metavar="A,B", help="all machines")
    add("--node_ip", default="127.0.0.1", metavar="A", help="this machine")
    add("--print_config", type=_truth, default=True, metavar="BOOL", help="print the arguments")
    add("training_script", metavar="SCRIPT", help="a Python file")
    add("training_script_args", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")


def _truth(word: str) -> bool:
    """Parses a boolean as its writer meant it: in the original, `False` was true."""
    return word.strip().lower() not in _FALSE


def tell(args: argparse.Namespace) -> None:
    """Prints the arguments."""
    lines = [f"{name}: {value}" for name, value in sorted(vars(args).items())]
    width = max(map(len, lines))
    rule = "-" * width
    title = " arguments ".center(width, "-")
    sys.stdout.write("\n".join([title, *lines, rule]) + "\n")
    sys.stdout.flush()


def script_command(args: argparse.Namespace, runner: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Returns the command that runs the script."""
    if not Path(args.training_script).exists():
        hint = "arguments of the launch stand before the script, its own after it"
        raise ProgramError(f"there is no script {args.training_script}", hint=hint)
    return (sys.executable, "-u", *runner, args.training_script, *args.training_script_args)


def run_as_command(
    launch: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None
) -> int:
    """Calls a launch; on an error, prints it with its notes and returns 2."""
    try:
        return launch(argv)
    except (JaxfleetError, OSError) as error:
        lines = [f"error: {error}", *getattr(error, "__notes__", ())]
        sys.stderr.write("\n".join(lines) + "\n")
        return _USER_ERROR


_FIRST_PORT = 6070
_FIRST_PORT_OF_CLOUD = 6170
_INFO = 20  # a level of `logging`
_INSECURE = (
    "launch: this job on several machines runs without a secret: whoever reaches its ports can "
    "take part; set JAXFLEET_SECRET_FILE to a file with the same content on each\n"
)


def launch(argv: Sequence[str] | None = None, *, runner: tuple[str, ...] = ()) -> int:
    """Runs a script as its arguments specify; returns 1 if a process failed."""
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
        # The original has no secret, nor an argument for one; JAXFLEET_SECRET_FILE specifies it.
        insecure=insecure,
        quiet=args.log_level > _INFO,
        proxies=False,
    )
    return 1 if launch_ranks(job, logs=lambda _, rank: f"workerlog.{rank}") else 0


def main(argv: Sequence[str] | None = None, *, runner: tuple[str, ...] = ()) -> int:
    """Like `launch`, but prints errors in the arguments."""
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
    """The machines on which a job runs."""

    nodes: Nodes
    cloud: CloudNodes | None = None

    def port(self, args: argparse.Namespace, count: int) -> int:
        """Returns the first port of a machine, 0 to pick free ones."""
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
            sys.stderr.write(f"PaddleCloud specifies {found}, which is used instead of {asked}\n")
    return _Place(_nodes(names, own), cloud)


def _nodes(names: tuple[str, ...], own: str) -> Nodes:
    if own not in names:
        hint = "--node_ip is this machine's, as it stands in --cluster_node_ips"
        raise AssertedError(f"this machine, {own}, is none of {', '.join(names)}", hint=hint)
    return Nodes(names, own)
