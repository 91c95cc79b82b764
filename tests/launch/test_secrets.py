"""Every launched job has a secret, which only its processes can read."""

import fcntl
import os
import stat
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from jaxfleet.cli import launch as command
from jaxfleet.cli import main
from jaxfleet.errors import StrategyError
from jaxfleet.launch import CollectiveJob, Job, Nodes, launch, launch_ranks
from jaxfleet.launch.starter import temporary_folder
from tests.launch.jobs import IDLE, job, python, waiting

SHOW = """
import os, pathlib, stat, sys
path = pathlib.Path(os.environ["JAXFLEET_SECRET_FILE"])
modes = [oct(stat.S_IMODE(one.stat().st_mode)) for one in (path, path.parent)]
print(path, *modes, len(path.read_text().strip()), os.environ.get("JAXFLEET_INSECURE"))
"""
SHOW_ALL = """
import os
print(sorted(n for n in os.environ if n in ("JAXFLEET_SECRET_FILE", "JAXFLEET_INSECURE")))
"""


def words(out: str) -> list[str]:
    return out.partition("| ")[2].split()


@pytest.mark.processes
def test_a_job_has_a_secret_of_its_own_that_its_owner_alone_reads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert launch(job(SHOW, IDLE)) == 0
    path, file_mode, folder_mode, size, insecure = words(capsys.readouterr().out)
    assert (file_mode, folder_mode, size, insecure) == ("0o600", "0o700", "64", "None")
    assert not Path(path).parent.exists()
    assert launch_ranks(CollectiveJob(command=python(SHOW))) == 0
    other, *modes, _, _ = words(capsys.readouterr().out)
    assert (other != path, modes) == (True, ["0o600", "0o700"])
    assert not Path(other).parent.exists()


@pytest.mark.processes
def test_a_secret_that_is_given_is_used_and_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "mine"
    given.write_text("0123456789abcdef")
    given.chmod(0o600)
    assert launch(job(SHOW, IDLE, secret_file=given)) == 0
    assert words(capsys.readouterr().out)[0] == str(given)
    assert stat.S_IMODE(given.stat().st_mode) == 0o600


@pytest.mark.processes
def test_an_insecure_job_has_no_secret_and_its_processes_are_given_the_risk(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXFLEET_SECRET_FILE", "/of/another/job")
    assert launch(job(SHOW_ALL, IDLE, insecure=True)) == 0
    assert "['JAXFLEET_INSECURE']" in capsys.readouterr().out


def test_a_job_with_a_secret_is_not_insecure_too(tmp_path: Path) -> None:
    (tmp_path / "s").touch()
    with pytest.raises(StrategyError, match="is to be insecure"):
        replace(job(SHOW), secret_file=tmp_path / "s", insecure=True)


@pytest.mark.parametrize("asked", [CollectiveJob(command=("x",)), job(SHOW)])
def test_several_machines_need_a_secret_that_all_have(asked: CollectiveJob | Job) -> None:
    with pytest.raises(StrategyError, match="several machines has no secret") as caught:
        replace(asked, nodes=Nodes(("a", "b"), "a"))
    assert "--secret-file" in caught.value.__notes__[0]


def test_a_folder_of_a_launch_is_locked_against_being_tidied_away() -> None:
    with ExitStack() as stack:
        folder = temporary_folder(stack)
        other = os.open(folder, os.O_RDONLY)
        stack.callback(os.close, other)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not folder.exists()


def test_a_server_started_by_hand_without_a_secret_is_refused_with_the_ways_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("JAXFLEET_INSECURE")
    here = "127.0.0.1:6174"
    places = {"PADDLE_PSERVERS_IP_PORT_LIST": here, "PADDLE_CURRENT_ENDPOINT": here}
    for name, value in {"TRAINING_ROLE": "PSERVER", "PADDLE_TRAINERS_NUM": "1", **places}.items():
        monkeypatch.setenv(name, value)
    assert main(["serve"]) == 2
    error = capsys.readouterr().err
    assert f"error: the server at {here} has no secret" in error
    assert "JAXFLEET_SECRET_FILE" in error
    assert "JAXFLEET_INSECURE=1" in error


SAYS_FOLDERS = """
import os, pathlib, sys, time
print(os.environ["JAXFLEET_SAVE_DIR"], flush=True)
pathlib.Path({said!r}).touch()
time.sleep(60)
"""


@pytest.mark.few(1)
@pytest.mark.processes
@pytest.mark.parametrize("given", [True, False])
def test_servers_are_told_the_folders_of_the_launch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    given: bool,
) -> None:
    monkeypatch.delenv("JAXFLEET_SAVE_DIR")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "said").mkdir()
    server = SAYS_FOLDERS.format(said=str(tmp_path / "said" / "it"))
    folders = (Path("here"), Path("/there")) if given else ()
    assert launch(job(waiting(tmp_path / "said"), server, save_dirs=folders)) == 0
    wanted = f"{tmp_path / 'here'}:/there" if given else str(tmp_path)
    assert f"server 0  | {wanted}\n" in capsys.readouterr().out


def test_the_command_line_gives_a_job_its_secret_and_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Job] = []
    monkeypatch.setattr(command, "launch", lambda asked: launched.append(asked) or 0)  # type: ignore[func-returns-value]
    script, secret = tmp_path / "train.py", tmp_path / "secret"
    script.touch()
    secret.touch()
    assert main(["launch", "--insecure", "--save-dir", f"a{os.pathsep}/b", str(script)]) == 0
    assert main(["launch", "--secret-file", str(secret), str(script)]) == 0
    monkeypatch.setenv("JAXFLEET_SECRET_FILE", str(secret))
    assert main(["launch", str(script)]) == 0
    assert main(["launch", "--insecure", "--secret-file", str(secret), str(script)]) == 2
    open_job, given, by_variable = launched
    assert (open_job.insecure, open_job.secret_file) == (True, None)
    assert open_job.save_dirs == (Path("a"), Path("/b"))
    assert given.secret_file == by_variable.secret_file == secret
    assert not given.insecure
