"""A server that dies is restarted in its place, up to a limit."""

from pathlib import Path

import pytest

from jaxfleet.launch import PORT_TAKEN, launch
from tests.launch.jobs import IDLE, job, noted, noting, waiting

pytestmark = pytest.mark.processes

# Ends in a given way in its first runs, and prints the number of its run.
DIES = """
import os, pathlib, signal, sys, time
here = pathlib.Path(os.environ["JAXFLEET_CHECKPOINT_DIR"])
time_of_it = len(list(here.glob("run*")))
(here / f"run{{time_of_it}}").touch()
place, launch_id = (os.environ[f"{{x}}"] for x in ("PADDLE_CURRENT_ENDPOINT", "JAXFLEET_LAUNCH_ID"))
print("run", time_of_it, place, launch_id, flush=True)
if time_of_it < {times}:
    {how}
"""


def dying(folder: Path, how: str, times: int) -> tuple[str, str]:
    """Returns a trainer that waits for the server, and that server."""
    lives = folder / "lives"
    lives.mkdir()
    server = DIES.format(how=how, times=times) + noting(lives) + IDLE
    return waiting(lives), server


@pytest.mark.parametrize("how", ["sys.exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_server_that_dies_comes_back_at_its_old_port(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, server = dying(tmp_path, how, times=2)
    assert launch(job(trainer, server, restarts=2)) == 0
    out, err = capsys.readouterr()
    runs = [line.split() for line in out.splitlines()]
    assert [words[4] for words in runs] == ["0", "1", "2"]
    assert len({words[5] for words in runs}) == 1
    launch_ids = {words[6] for words in runs}
    assert len(launch_ids) == 1
    assert launch(job("pass", "import os; print('id', os.environ['JAXFLEET_LAUNCH_ID'])")) == 0
    assert capsys.readouterr().out.split()[-1] not in launch_ids
    assert "it is started again (2 of 2)" in err
    assert err.count(", start 3\n") == 1


def test_a_server_that_dies_too_often_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, server = dying(tmp_path, "sys.exit(7)", times=9)
    assert launch(job(trainer, server, restarts=1)) == 7
    err = capsys.readouterr().err
    assert err.count("it is started again") == 1
    assert "server 0 ended with exit code 7; its last lines are above" in err


def test_a_port_that_is_taken_is_tried_again_without_being_a_death(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, server = dying(tmp_path, f"sys.exit({PORT_TAKEN})", times=2)
    assert launch(job(trainer, server, restarts=0)) == 0
    assert capsys.readouterr().out.count("run") == 3


def test_a_server_that_fails_after_the_last_trainer_is_a_failure(tmp_path: Path) -> None:
    server = noting(tmp_path) + "import time; time.sleep(0.5); raise SystemExit(6)"
    assert launch(job(waiting(tmp_path), server, grace_s=10.0)) == 6
    assert len(noted(tmp_path)) == 1


def test_a_folder_for_checkpoints_that_nobody_named_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shows = "import os; print(os.environ['JAXFLEET_CHECKPOINT_DIR'], flush=True)\n"
    assert launch(job(waiting(tmp_path), shows + noting(tmp_path) + IDLE)) == 0
    folder = Path(capsys.readouterr().out.split()[-1])
    assert folder.name.startswith("jaxfleet-")
    assert not folder.exists()


def test_a_folder_for_checkpoints_that_was_named_stays(tmp_path: Path) -> None:
    server = "import os, pathlib; pathlib.Path(os.environ['JAXFLEET_CHECKPOINT_DIR'], 'x').touch()"
    named = tmp_path / "made" / "here"
    assert launch(job("pass", server, checkpoint_dir=named, grace_s=10.0)) == 0
    assert (named / "x").exists()
