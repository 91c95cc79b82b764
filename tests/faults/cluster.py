"""Real processes of a small job, which tests kill, suspend and restart."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from jaxfleet.env import PserverRole, cluster_environment
from jaxfleet.launch.placement import Ports
from tests.faults import training

WAIT_S = 150.0  # for events that are immediate on an idle machine
LOST_S = 2.0  # silence after which a peer of a job in memory is lost
REAL_LOST_S = 5.0  # the same for processes, which a busy machine may delay
PATIENT_S = 30.0  # the same if all live: on a busy machine some are silent for seconds
MARGIN_S = 60.0  # on top of it, for a busy machine: a step of those jobs may take 30 s
STEP_S = 6.0  # limit for a living peer
TRAINING = Path(training.__file__)


@dataclass
class Started:
    """A process and its output.

    Attributes:
        name: `trainer 0`.
        process: the process.
        log: file of its output.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def text(self) -> str:
        """Returns its output so far."""
        return self.log.read_text(errors="replace")

    def reaches(self, text: str, timeout_s: float = WAIT_S) -> None:
        """Waits until its output contains a text."""
        deadline = time.monotonic() + timeout_s
        while text not in self.text():
            ended = self.process.poll()
            assert ended is None or text in self.text(), f"{self.name} ended with {ended}"
            assert time.monotonic() < deadline, f"{self.name} did not write '{text}'"
            time.sleep(0.02)

    def ends(self, timeout_s: float = WAIT_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            # The default handler of faulthandler's signal prints where it hangs.
            raise AssertionError(f"{self.name} did not end within {timeout_s} s") from None

    def fails(self, *words: str, timeout_s: float = WAIT_S) -> str:
        """Waits for its end by an error with a message; returns its whole output."""
        code, text = self.ends(timeout_s), self.text()
        assert code != 0, f"{self.name} ended with 0"
        missing = [word for word in words if word not in text]
        assert not missing, f"{self.name} did not say {missing}"
        return text


@dataclass
class Jobs:
    """Starts the processes of one job, and ends the remaining ones.

    Attributes:
        folder: of logs, checkpoints and results.
        servers: the number of servers.
        trainers: the number of trainers.
        returns_s: how long trainers wait for a server; with it, servers keep checkpoints.
        options: of the training script, after its name.
        secret: the secret's file.
        job: the job's name.
        step_s: the servers' limit for living peers.
        lost_s: silence after which a peer is lost; other scripts have their own.
        script: the trainers' script.
    """

    folder: Path
    servers: int = 1
    trainers: int = 2
    returns_s: float = 0.0
    options: Sequence[str] = ()
    secret: Path | None = None
    job: str = "faults"
    step_s: float = STEP_S
    lost_s: float = REAL_LOST_S
    script: Path = TRAINING
    started: list[Started] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        ports = Ports(self.servers, first=0)
        self.endpoints = tuple(ports.endpoints)
        ports.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        left = [one for one in self.started if one.process.poll() is None]
        for one in left:
            one.process.kill()
            one.process.wait(WAIT_S)
        if error is not None or left:
            for one in self.started:
                print(f"--- {one.name}: exit code {one.process.returncode}\n{one.text()}")  # noqa: T201
        if error is None:
            assert not left, f"{[one.name for one in left]} did not end"

    def cluster(self, **changed: object) -> PserverRole:
        found = PserverRole(
            role="trainer",
            trainers=self.trainers,
            endpoints=self.endpoints,
            job=self.job,
            secret_file=self.secret,
            server_return_s=self.returns_s,
            insecure=self.secret is None,
            save_dirs=(self.folder.parent,),
        )
        return replace(found, **changed)  # type: ignore[arg-type]

    def server(self, number: int = 0, *, prefix: Sequence[str] = (), **changed: object) -> Started:
        keeps = self.folder / "own" if self.returns_s else None
        settings = {"role": "pserver", "current_endpoint": self.endpoints[number]}
        cluster = self.cluster(**settings | {"checkpoint_dir": keeps} | changed)
        command = [*prefix, sys.executable, "-m", "jaxfleet", "serve"]
        times = [f"--lost-after={self.lost_s}", f"--step-timeout={self.step_s}"]
        return self.start(f"server {number}", [*command, *times], cluster)

    def trainer(self, number: int, *options: str, **changed: object) -> Started:
        cluster = self.cluster(trainer_id=number, **changed)
        words = [f"--out={self.folder}", *self.options, *options]
        if self.script == TRAINING and self.lost_s != REAL_LOST_S:
            words.append(f"--lost-after={self.lost_s}")
        command = [sys.executable, str(self.script), *words]
        return self.start(f"trainer {number}", command, cluster)

    def all_servers(self) -> list[Started]:
        return [self.server(number) for number in range(self.servers)]

    def all_trainers(self, *options: str) -> list[Started]:
        return [self.trainer(number, *options) for number in range(self.trainers)]

    def start(self, name: str, command: Sequence[str], cluster: PserverRole | None) -> Started:
        """Starts a process with its output in a file."""
        log = self.folder / f"{len(self.started)}-{name.replace(' ', '-')}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                env=(dict(os.environ) if cluster is None else cluster_environment(cluster))
                | SETTINGS,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        self.started.append(Started(name, process, log))
        return self.started[-1]

    def result(self, number: int) -> Path:
        """Returns the file of a trainer's final state."""
        return self.folder / f"result-{number}.npz"

    def results(self) -> list[dict[str, np.ndarray]]:
        return [read(self.result(number)) for number in range(self.trainers)]


# One thread is enough for such small arrays, and leaves cores to the others.
SETTINGS = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "JAX_PLATFORMS": "cpu",
    "NPROC": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONWARNINGS": "default",
}


def read(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as found:
        return {name: found[name] for name in found.files}


def check_same(results: Sequence[dict[str, np.ndarray]], wanted: dict[str, np.ndarray]) -> None:
    """Checks that all states are equal, bit for bit."""
    for found in results:
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            assert array.dtype == found[name].dtype
            np.testing.assert_array_equal(
                array.reshape(-1).view(np.uint8), found[name].reshape(-1).view(np.uint8), name
            )


def wait_until(reached: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Waits for an effect of other processes."""
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.02)


def memory_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
