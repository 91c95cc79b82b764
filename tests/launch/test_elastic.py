"""A collective job whose rank is killed resumes from its checkpoint, to the same result."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxfleet.launch.starter import write_secret
from tests.launch.jobs import free_ports

SCRIPT = Path(__file__).with_name("elastic.py")
LONGEST_S = 300.0  # two cores, shared with other tests, compile for two ranks

# By default, `test_ranks.py` restarts ranks whose scripts need no JAX.
pytestmark = [pytest.mark.processes, pytest.mark.grid, pytest.mark.timeout(2 * LONGEST_S + 60)]


def started(folder: Path, *options: str, dying: bool = False) -> "subprocess.Popen[str]":
    """Launches the script; kills rank 1 before step 5 on request."""
    folder.mkdir(exist_ok=True)
    words = [sys.executable, "-m", "jaxfleet", "launch", "--threads", "1", *options]
    words += ["--timeout", str(LONGEST_S), str(SCRIPT), str(folder), *["1", "5"] * dying]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def ended(*launches: "subprocess.Popen[str]") -> list[str]:
    """Waits for launches to succeed; returns the output of each."""
    try:
        written = [launch.communicate(timeout=LONGEST_S + 30)[0] for launch in launches]
    finally:
        for launch in launches:
            launch.kill()  # its guard ends the remaining processes
    assert [launch.returncode for launch in launches] == [0] * len(launches), "\n".join(written)
    return written


def finals(folder: Path) -> list[dict[str, np.ndarray]]:
    """Returns the final states of both ranks."""
    return [dict(np.load(folder / f"final-{rank}.npz")) for rank in range(2)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, np.ndarray]]:
    """Returns the final states of an undisturbed job."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (out,) = ended(started(folder, "--nproc", "2"))
    assert out.count("begins at 0 in start 0") == 2, out
    assert out.count("after 8 steps") == 2, out
    return finals(folder)


def same(one: list[dict[str, np.ndarray]], other: list[dict[str, np.ndarray]]) -> bool:
    """Whether states are the same, bit by bit."""
    pairs = list(zip(one, other, strict=True))
    assert all(len(a) == 8 and a.keys() == b.keys() for a, b in pairs)
    return all(a[name].tobytes() == b[name].tobytes() for a, b in pairs for name in a)


def test_a_job_whose_rank_is_killed_ends_as_the_undisturbed_one(
    tmp_path: Path, undisturbed: list[dict[str, np.ndarray]]
) -> None:
    (out,) = ended(started(tmp_path, "--nproc", "2", "--max-restarts", "1", dying=True))
    assert "rank 1 killed by SIGKILL" in out, out
    assert "all ranks are started again (1 of 1), each from what it has saved" in out, out
    assert out.count("begins at 4 in start 1") == 2, out
    assert same(finals(tmp_path), undisturbed)
    states = finals(tmp_path)
    assert same([states[0]] * 2, states)


def test_machines_start_again_for_want_of_a_rank_that_was_killed_on_another(
    tmp_path: Path, undisturbed: list[dict[str, np.ndarray]]
) -> None:
    options = ["--nproc", "1", "--nodes", "127.0.0.1,127.0.0.2", "--max-restarts", "1"]
    options += ["--insecure", "--port", str(free_ports(2)), "--node"]
    nodes = [started(tmp_path, *options, f"127.0.0.{n}", dying=True) for n in (1, 2)]
    first, second = ended(*nodes)
    assert "PeerLostError: step 6: rank 1 is lost" in first, first
    assert "rank 1 killed by SIGKILL" in second, second
    for out in (first, second):
        assert "all ranks are started again (1 of 1)" in out, out
        assert out.count("begins at 4 in start 1") == 1, out
    assert same(finals(tmp_path), undisturbed)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Returns the final state of one device."""
    folder = tmp_path_factory.mktemp("alone")
    ended(started(folder, "--nproc", "1"))
    return dict(np.load(folder / "final-0.npz"))


def is_close(folder: Path, rank: int, alone: dict[str, np.ndarray]) -> bool:
    """Whether a final state is that of one device, but for the order of sums in float32."""
    found = dict(np.load(folder / f"final-{rank}.npz"))
    assert found.keys() == alone.keys()
    return all(np.allclose(found[name], alone[name], rtol=1e-4, atol=1e-6) for name in alone)


def test_a_job_goes_on_with_the_ranks_that_are_left(
    tmp_path: Path, alone: dict[str, np.ndarray]
) -> None:
    (out,) = ended(started(tmp_path, "--nproc", "1:3", "--max-restarts", "1", dying=True))
    assert "rank 1 killed by SIGKILL" in out, out
    assert "started again (1 of 1), each from what it has saved; 2 of 3 ranks are left" in out, out
    assert out.count("begins at 4 in start 1") == 2, out
    assert all(is_close(tmp_path, rank, alone) for rank in range(2))
    assert not (tmp_path / "final-2.npz").exists()


def test_a_job_goes_on_without_a_machine_that_is_lost(
    tmp_path: Path, alone: dict[str, np.ndarray]
) -> None:
    options = ["--nproc", "1", "--nodes", "127.0.0.1,127.0.0.2", "--min-nodes", "1"]
    options += ["--max-restarts", "1", "--job", "j", "--port", str(free_ports(6))]
    options += ["--secret-file", str(write_secret(tmp_path / "key")), "--node"]
    # The launch of the other machine is suspended once its rank has begun, so that it cannot come
    # to the next start, and the rank is killed before step 5.
    lost, first = (started(tmp_path, *options, f"127.0.0.{n}", dying=True) for n in (2, 1))
    assert lost.stdout is not None
    before = ""
    while "begins at 0" not in before:
        before = lost.stdout.readline()
        assert before, "the launch ended early"
    lost.send_signal(signal.SIGSTOP)
    try:
        (out,) = ended(first)
    finally:
        lost.kill()
    lost.communicate(timeout=LONGEST_S)
    assert "PeerLostError: step 6: rank 1 is lost" in out, out
    assert "started again (1 of 1), each from what it has saved; 1 of 2 ranks are left" in out, out
    assert out.count("begins at 4 in start 1") == 1, out
    assert is_close(tmp_path, 0, alone)
