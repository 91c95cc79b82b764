"""Long jobs: trainers' replay logs, and replays to a late restarted server, stay small."""

from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from jaxfleet.ps.client.client import Client
from jaxfleet.runtime.pserver_job import JobPrograms
from jaxfleet.transport.messages import Kind, Message
from tests.faults.cluster import check_same
from tests.faults.conftest import Undisturbed
from tests.faults.memory_training import TrainingJob

STEPS = 170
KILLED = 160
SAVED = 100  # steps between two checkpoints, on the job's clock
MOST = 110  # and some in flight


class Watched(TrainingJob):
    """A job that records the trainers' logs and replays."""

    def __init__(self, folder: Path, *options: str) -> None:
        words = [f"--steps={STEPS}", "--step-timeout=30", *options]
        self.clients: list[Client] = []
        self.kept: list[int] = []
        self.anew: set[int] = set()
        super().__init__(folder, returns_s=30.0, step_s=30.0, options=words, faults=self._note)

    def _note(self, endpoint: str, message: Message) -> int:
        if endpoint == self.endpoints[0] and message.kind is Kind.PUSH and self.starts[0] > 1:
            self.anew |= {message.step} if message.step <= KILLED else set()
        return 1

    def _connect(self, trainer: int, job: JobPrograms) -> Client:
        self.clients.append(super()._connect(trainer, job))
        return self.clients[-1]

    def finished(self, trainer: int, step: int, pause_s: float = 0.0) -> None:
        self.kept.append(self.clients[0].replay.bytes)
        super().finished(trainer, step, pause_s)


@pytest.mark.grid
@pytest.mark.parametrize("kind", ["plain", "table"])
def test_little_is_kept_and_sent_anew_however_long_a_job_runs(
    kind: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    job = Watched(tmp_path, f"--kind={kind}", "--pause=0.02")
    job.run({(0, KILLED): partial(job.kill_server, 0, away_s=1.0)})
    check_same(job.results(), undisturbed(kind, STEPS))
    assert job.anew == set(range(SAVED + 1, KILLED + 1))
    a_step = max(later - sooner for sooner, later in pairwise(job.kept))
    assert max(job.kept) < 1.3 * MOST * a_step
