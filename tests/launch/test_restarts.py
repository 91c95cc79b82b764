"""A server or trainer that dies is restarted in its place, and a job as a whole, up to a limit."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from jaxfleet.env import SaveInterval
from jaxfleet.errors import StrategyError
from jaxfleet.launch import PORT_TAKEN, CollectiveJob, Nodes, launch, launch_ranks, restarts
from jaxfleet.launch.restarts import RestartBudget
from tests.launch.jobs import IDLE, job, noted, noting, python, waiting

if TYPE_CHECKING:
    from jaxfleet.launch.process import Process

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


@pytest.mark.few(1)
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


@pytest.mark.grid
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


# Notes its life in a folder, and ends in a given way in its first lives.
LIVES = """
import os, pathlib, signal, sys
life = int(os.environ.get("JAXFLEET_RESTART", "0"))
print("life", life, os.environ["PADDLE_TRAINER_ID"], flush=True)
if life < {times} and os.environ["PADDLE_TRAINER_ID"] == "0":
    {how}
"""


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_trainer_that_dies_is_started_again_with_its_next_life(
    how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = LIVES.format(how=how, times=2)
    assert launch(job(trainer, trainers=2, trainer_restarts=2, grace_s=0.2)) == 0
    out, err = capsys.readouterr()
    lives = sorted(line.partition("| ")[2] for line in out.splitlines())
    assert lives == ["life 0 0", "life 0 1", "life 1 0", "life 2 0"]
    assert "it is started again (2 of 2)" in err
    assert re.search(r"trainer 0: process \d+, start 3\n", err)


def test_a_trainer_that_dies_too_often_ends_the_job_with_its_last_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = LIVES.format(how="sys.exit(5 + life)", times=9)
    assert launch(job(trainer, trainer_restarts=1)) == 6
    assert capsys.readouterr().err.count("it is started again") == 1


def test_a_trainer_whose_script_fails_at_once_is_not_started_for_ever(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "_AGAIN_S", 0.01)
    trainer = LIVES.format(how="sys.exit(1)", times=99)
    assert launch(job(trainer, trainer_restarts=99)) == 1
    err = capsys.readouterr().err
    assert err.count("it is started again") == 3
    assert "trainer 0 is not started again: it failed 4 times in a row soon after its start" in err


def test_a_trainer_that_lost_a_peer_is_started_again_with_the_whole_job(
    capsys: pytest.CaptureFixture[str],
) -> None:
    how = "sys.exit('jaxfleet.errors.PeerLostError: server 1 was started again, too')"
    trainer = LIVES.format(how=how, times=1)
    assert launch(job(trainer, trainers=2, trainer_restarts=9, max_restarts=1, grace_s=0.2)) == 0
    out, err = capsys.readouterr()
    lives = sorted(line.partition("| ")[2] for line in out.splitlines())
    assert lives == ["life 0 0", "life 0 1", "life 1 0", "life 1 1"]
    assert "trainer 0 lost a peer, so it is not started again alone" in err
    assert "the whole job is started again (1 of 1)" in err


# Shows where a process keeps compiled code.
KEEPS = """
import os
print(os.environ.get("TRAINING_ROLE"), os.environ.get("JAX_COMPILATION_CACHE_DIR"), flush=True)
"""


@pytest.mark.grid
def test_trainers_that_may_be_started_again_keep_compiled_code_as_servers_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    shown = []
    trainer = KEEPS + "import time; time.sleep(0.5)"
    for restarts_of_it in (1, 0):
        started = job(trainer, KEEPS + IDLE, trainer_restarts=restarts_of_it, grace_s=0.2)
        assert launch(started) == 0
        lines = capsys.readouterr().out.splitlines()
        shown.append(dict(line.partition("| ")[2].split() for line in lines))
    assert shown[0]["TRAINER"] == shown[0]["PSERVER"] != "None"
    assert shown[1]["TRAINER"] == "None" != shown[1]["PSERVER"]


def test_delays_double_after_errors_and_not_after_signals() -> None:
    budget = RestartBudget(9, gives_up=True)
    quick, killed, late = (
        cast("Process", SimpleNamespace(status=status, seconds=seconds))
        for status, seconds in ((1, 2.0), (137, 2.0), (1, 900.0))
    )
    spent = [budget.spend(each) for each in (quick, quick, quick, killed, quick, late, quick)]
    assert spent == [0.5, 1.0, 2.0, 0.5, 0.5, 0.5, 0.5]
    assert RestartBudget(0).spend(killed) is None


def test_without_the_option_a_trainer_that_dies_ends_the_job() -> None:
    assert launch(job(LIVES.format(how="sys.exit(4)", times=1))) == 4


STARTS = """
import os, pathlib, sys, time
start = int(os.environ.get("JAXFLEET_RESTART", "0"))
print("start", start, flush=True)
sys.exit(0 if start == {last} else 8 + start)
"""
# Prints whether it finds checkpoints of an earlier process at its place.
FINDS = """
import os, pathlib, time
here = pathlib.Path(os.environ["JAXFLEET_CHECKPOINT_DIR"], os.environ["JAXFLEET_JOB"], "server0")
print("found", here.exists(), os.environ["JAXFLEET_LAUNCH_ID"], flush=True)
here.mkdir(parents=True)
time.sleep(200)
"""


@pytest.mark.grid
def test_the_whole_job_is_started_again_without_its_servers_checkpoints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = f"import time; time.sleep(0.4)\n{STARTS.format(last=2)}"
    assert launch(job(trainer, FINDS, max_restarts=2, grace_s=0.2)) == 0
    out, err = capsys.readouterr()
    lines = [line.partition("| ")[2].split() for line in out.splitlines()]
    assert [words[1] for words in lines if words[0] == "start"] == ["0", "1", "2"]
    found = [words for words in lines if words[0] == "found"]
    assert [words[1] for words in found] == ["False"] * 3
    assert len({words[2] for words in found}) == 3
    assert "trainer 0 ended with exit code 8" in err
    assert "the whole job is started again (2 of 2)" in err


def test_the_status_after_the_last_start_of_a_job_is_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert launch(job(STARTS.format(last=9), max_restarts=1, grace_s=0.2)) == 9
    assert capsys.readouterr().err.count("the whole job is started again") == 1


def test_a_job_on_several_machines_does_not_start_again_as_a_whole() -> None:
    nodes = Nodes(("127.0.0.1", "127.0.0.2"), "127.0.0.1")
    with pytest.raises(StrategyError, match="cannot start again as a whole"):
        job("pass", nodes=nodes, insecure=True, max_restarts=1)


SAVES = """
import os, pathlib
to, every, keep = (os.environ[f"JAXFLEET_SAVE_{x}"] for x in ("TO", "EVERY", "KEEP"))
pathlib.Path(to).mkdir(parents=True, exist_ok=True)
print("saves", to, every, keep, len(list(pathlib.Path(to).iterdir())), flush=True)
pathlib.Path(to, os.environ.get("JAXFLEET_RESTART", "0")).touch()
"""


@pytest.mark.grid
def test_periodic_checkpoints_outlast_a_start_of_the_whole_job_and_servers_may_write_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = f"import os; print('allowed', os.environ['JAXFLEET_SAVE_DIR'], flush=True)\n{IDLE}"
    every = SaveInterval(seconds=300.0)
    options = {"max_restarts": 1, "grace_s": 0.5, "save_every": every, "name": "own"}
    trainer = f"import time; time.sleep(0.4)\n{SAVES}{STARTS.format(last=1)}"
    assert launch(job(trainer, server, checkpoint_dir=tmp_path, **options)) == 0
    lines = [line.partition("| ")[2].split() for line in capsys.readouterr().out.splitlines()]
    folder = str(tmp_path / "own" / "saved")
    assert [words[1:] for words in lines if words[0] == "saves"] == [
        [folder, "300s", "3", "0"],
        [folder, "300s", "3", "1"],
    ]
    assert all(folder in words[1].split(":") for words in lines if words[0] == "allowed")
    assert len(list(Path(folder).iterdir())) == 2


def test_ranks_have_periodic_checkpoints_in_a_folder_that_goes_with_the_launch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    every = SaveInterval(steps=7)
    ranks = CollectiveJob(command=python(SAVES), save_every=every, save_keep=2, grace_s=0.5)
    assert launch_ranks(ranks) == 0
    _, folder, *rest = capsys.readouterr().out.partition("| ")[2].split()
    assert rest == ["7steps", "2", "0"]
    assert folder.startswith("/")
    assert not Path(folder).exists()


def test_periodic_checkpoints_of_several_machines_need_a_folder() -> None:
    nodes = Nodes(("127.0.0.1", "127.0.0.2"), "127.0.0.1")
    with pytest.raises(StrategyError, match="no folder for its checkpoints"):
        job("pass", nodes=nodes, insecure=True, save_every=SaveInterval(steps=1))
