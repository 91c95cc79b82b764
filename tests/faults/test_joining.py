"""Processes of other jobs are rejected by name; those of the job may arrive in any order."""

import resource
import socket
import sys
import time
from pathlib import Path

import pytest

from jaxfleet.checkpoint import CheckpointSeries
from jaxfleet.launch import PORT_TAKEN
from tests.faults.cluster import PATIENT_S, Jobs, check_same, wait_until
from tests.faults.conftest import Undisturbed

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def listens(endpoint: str) -> bool:
    """Whether an endpoint accepts connections."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port))).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.grid
def test_who_does_not_belong_is_refused_and_the_job_goes_on(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    options = ["--steps=6", "--step-timeout=60"]
    with Jobs(tmp_path, servers=2, step_s=60.0, lost_s=PATIENT_S, options=options) as jobs:
        # Trainers may arrive before servers.
        trainer = jobs.trainer(0)
        time.sleep(3.0)
        servers = jobs.all_servers()
        servers[0].reaches("serving")
        wait_until(lambda: listens(jobs.endpoints[0]), "the server to listen")
        # A connection that sends half a message, and stays.
        host, _, port = jobs.endpoints[0].rpartition(":")
        with socket.create_connection((host, int(port))) as half:
            half.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03")
            size, job = jobs.trainer(1, trainers=3), jobs.trainer(1, job="another")
            rate, twice = jobs.trainer(1, "--rate=0.1"), jobs.trainer(0)
            size.fails("ProgramError", "reports trainers 3, and the server 2")
            job.fails("ProgramError", "reports job another, and the server faults")
            rate.fails("ProgramError", "reports program", "the same job, script and strategy")
            twice.fails("ProgramError", "there is a trainer 0 already, last heartbeat")
            last = jobs.trainer(1)
            assert [one.ends() for one in (trainer, last, *servers)] == [0, 0, 0, 0]
        check_same(jobs.results(), undisturbed("plain", 6))


def secret(folder: Path, name: str, mode: int = 0o600) -> Path:
    path = folder / name
    path.write_text(f"{name} that nobody guesses")
    path.chmod(mode)
    return path


@pytest.mark.grid
def test_only_who_has_the_secret_takes_part(tmp_path: Path, undisturbed: Undisturbed) -> None:
    own, other = secret(tmp_path, "own secret"), secret(tmp_path, "another secret")
    seen = secret(tmp_path, "seen secret", 0o644)
    options = ["--steps=6", "--step-timeout=60"]
    with Jobs(tmp_path, step_s=60.0, lost_s=PATIENT_S, secret=own, options=options) as jobs:
        server = jobs.server()
        wrong = jobs.trainer(1, "--connect=4", secret_file=other)
        none = jobs.trainer(1, "--connect=4", secret_file=None)
        open_to_all = jobs.trainer(1, secret_file=seen)
        open_to_all.fails("StrategyError", "others than its owner may use", "chmod 600")
        for stranger in (wrong, none):
            text = stranger.fails("ConnectError", "trainer 1 waited 4 s", "for hello from server 0")
            assert "with the same endpoints and secret" in text
        trainers = jobs.all_trainers()
        assert [one.ends() for one in (*trainers, server)] == [0, 0, 0]
        check_same(jobs.results(), undisturbed("plain", 6))


@pytest.mark.grid
def test_a_copy_of_a_trainer_that_ends_takes_nothing_with_it(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    options = ["--steps=6", "--step-timeout=60", "--fork-at=3"]
    with Jobs(tmp_path, step_s=60.0, lost_s=PATIENT_S, options=options) as jobs:
        server, trainers = jobs.server(), jobs.all_trainers()
        assert [one.ends() for one in (*trainers, server)] == [0, 0, 0]
        check_same(jobs.results(), undisturbed("plain", 6))


@pytest.mark.grid
def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with Jobs(tmp_path) as jobs, socket.socket() as taken:
        host, _, port = jobs.endpoints[0].rpartition(":")
        taken.bind((host, int(port)))
        taken.listen()
        server = jobs.server()
        text = server.fails(
            f"cannot listen at {jobs.endpoints[0]}", "another process listens there"
        )
        assert server.process.returncode == PORT_TAKEN
        assert "Traceback" not in text


@pytest.mark.grid
@pytest.mark.skipif(sys.platform != "linux", reason="limits a running process's files")
def test_a_disk_that_is_full_is_named_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    options = ["--steps=500", "--pause=0.05", "--replay-bytes=4000"]
    with Jobs(tmp_path, returns_s=5.0, options=options) as jobs:
        server, *trainers = jobs.server(), *jobs.all_trainers()
        trainers[0].reaches("step 4.")
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (200, 200))
        for trainer in trainers:
            trainer.fails("CheckpointError", "File too large", "reported by server 0 at")
        server.kill()
        latest = CheckpointSeries(tmp_path / "own" / "faults" / "server0").latest()
        assert latest is not None
        assert latest >= 1
