"""A SLURM cluster of two machines on this one: Debian's slurm-wlm and munge, started as root.

Machines are addresses of the loopback card, so their names need no entry anywhere.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "munged", "setpriv")
_UP_S, _END_S = 30.0, 10.0
_CONFIG = """\
ClusterName=jaxfleet
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmdTimeout=10
ReturnToService=2
MpiDefault=none
"""


def why_not() -> str:
    """Returns why no cluster can be started here; empty if one can."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"there is no {missing[0]}: apt-get install slurm-wlm munge"
    return "" if os.getuid() == 0 else "SLURM's daemons are started as root"


@dataclass
class SlurmCluster:
    """A cluster that runs.

    Attributes:
        folder: its files.
        machines: their names.
        environment: of commands that address it.
    """

    folder: Path
    machines: tuple[str, ...]
    environment: Mapping[str, str]
    daemons: dict[str, "subprocess.Popen[bytes]"]

    def run(self, *words: str) -> str:
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def state(self, job: str) -> str:
        """Returns a job's state: PENDING, RUNNING, COMPLETED, FAILED, ..."""
        found = self.run("scontrol", "show", "job", job)
        return found.partition("JobState=")[2].split()[0]

    def awaited(self, job: str, *states: str, within_s: float) -> str:
        until = time.monotonic() + within_s
        while (state := self.state(job)) not in states:
            assert time.monotonic() < until, f"job {job} is {state}, not {' or '.join(states)}"
            time.sleep(0.25)
        return state

    def lose(self, machine: str) -> None:
        """Kills all processes of a machine at once, as a loss of power does."""
        daemon = self.daemons[machine]
        lost = [daemon.pid, *_below(machine)]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # no process may report the end of another
            for pid in lost:
                os.kill(pid, number)
        daemon.wait(_END_S)

    def start(self, machine: str) -> None:
        """Starts a machine, again if it was lost."""
        with (self.folder / f"{machine}.log").open("ab") as log:
            self.daemons[machine] = subprocess.Popen(
                [*_with_us("slurmd"), "-D", "-N", machine],
                env=self.environment,
                stdout=log,
                stderr=log,
            )


def _path(program: str) -> str:
    return shutil.which(program) or program


def _with_us(program: str) -> tuple[str, ...]:
    """Returns the words that start a program which ends when this process is killed."""
    return _path("setpriv"), "--pdeathsig=TERM", "--", _path(program)


def _below(machine: str) -> list[int]:
    """Returns the processes of jobs on a machine, and what SLURM started them with."""
    tasks = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if f"SLURMD_NODENAME={machine}".encode() in variables:
            tasks[int(folder.name)] = above
    starters = {
        above
        for above in tasks.values()
        if above not in tasks and _name(above).startswith("slurmstepd")
    }
    return [*starters, *tasks]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Context in which two machines take jobs; all is ended after it."""
    host = socket.gethostname().partition(".")[0]
    ports = [_free_port() for _ in range(3)]
    machines = ("127.0.0.31", "127.0.0.32")
    config = folder / "slurm.conf"
    lines = [
        f"NodeName={name} NodeHostname={host} NodeAddr={name} Port={port} CPUs=8"
        for name, port in zip(machines, ports[1:], strict=True)
    ]
    lines.append(f"PartitionName=all Nodes={','.join(machines)} Default=YES MaxTime=30 State=UP")
    text = _CONFIG.format(host=host, port=ports[0], folder=folder)
    config.write_text(text + "\n".join(lines) + "\n")
    for name in ("state", *(f"spool.{machine}" for machine in machines)):
        (folder / name).mkdir()
    environment = {**os.environ, "SLURM_CONF": str(config)}
    with ExitStack() as stack:
        _start_munge(stack)
        with (folder / "slurmctld.log").open("wb") as log:
            controller = subprocess.Popen(
                [*_with_us("slurmctld"), "-D"], env=environment, stdout=log, stderr=log
            )
        cluster = SlurmCluster(folder, machines, environment, {"controller": controller})
        stack.callback(_end, cluster.daemons)
        for machine in machines:
            cluster.start(machine)
        until = time.monotonic() + _UP_S
        while cluster.run("sinfo", "-h", "-t", "idle", "-o", "%D").strip() != "2":
            assert time.monotonic() < until, _logs(folder)
            time.sleep(0.25)
        yield cluster


def _start_munge(stack: ExitStack) -> None:
    """Starts what authenticates SLURM's messages, unless it runs."""
    if subprocess.run([_path("munge"), "-n"], capture_output=True, check=False).returncode == 0:
        return
    Path("/run/munge").mkdir(mode=0o755, exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    words = [
        *_with_us("setpriv"),
        "--reuid=munge",
        "--regid=munge",
        "--clear-groups",
        "munged",
        "-F",
    ]
    stack.callback(_end, {"munged": subprocess.Popen(words)})


def _end(daemons: Mapping[str, "subprocess.Popen[bytes]"]) -> None:
    for daemon in daemons.values():
        daemon.terminate()
    for daemon in daemons.values():
        try:
            daemon.wait(_END_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port
