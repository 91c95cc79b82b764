"""`jaxfleet launch` on the command line."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jaxfleet.cli import launch as command
from jaxfleet.cli import main
from jaxfleet.env import read_cluster
from jaxfleet.errors import StrategyError
from jaxfleet.launch import Job, launch
from tests.launch.jobs import IDLE, job, python

SHOW = """
import sys
print(sys.argv[1:])
"""
ROLE = """
from jaxfleet.env import read_cluster
print(read_cluster())
"""


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Returns the jobs that the command launches; their servers only wait."""
    launched: list[Job] = []

    def launch_with_idle_servers(asked: Job) -> int:
        launched.append(asked)
        return launch(replace(asked, server=python(IDLE), grace_s=1.0))

    monkeypatch.setattr(command, "launch", launch_with_idle_servers)
    return launched


@pytest.mark.processes
def test_arguments_after_the_script_are_its_own(
    tmp_path: Path, jobs: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "a script.py"
    script.write_text(SHOW)
    words = ["--servers", "9", "-m", "--help", "two words", "", "--", "-x=$HOME;*"]
    assert main(["launch", "--trainers", "1", str(script), *words]) == 0
    assert capsys.readouterr().out == f"trainer 0 | {words}\n"
    assert jobs[0].servers == 1
    assert jobs[0].server == (sys.executable, "-m", "jaxfleet", "serve")


@pytest.mark.processes
def test_a_module_runs_with_its_arguments(
    tmp_path: Path,
    jobs: list[Job],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "trained_here").mkdir()
    (tmp_path / "trained_here" / "digits.py").write_text(SHOW)
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "-m", "trained_here.digits", "--epochs", "3"]) == 0
    assert capsys.readouterr().out == "trainer 0 | ['--epochs', '3']\n"
    assert len(jobs) == 1


def test_every_option_reaches_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Job] = []

    def note(asked: Job) -> int:
        launched.append(asked)
        return 0

    monkeypatch.setattr(command, "launch", note)
    (tmp_path / "train.py").touch()
    secret = tmp_path / "secret"
    secret.touch()
    monkeypatch.chdir(tmp_path)
    options = "--servers 2 --trainers 3 --job j --log-dir l --checkpoint-dir c --restarts 0"
    more = "--secret-file secret --port 7000 --timeout 9.5 --threads 1"
    seconds = "--server-return 7.5 --grace 2"
    assert main(["launch", *options.split(), *more.split(), *seconds.split(), "train.py"]) == 0
    assert launched == [
        Job(
            trainer=(sys.executable, "train.py"),
            servers=2,
            trainers=3,
            name="j",
            log_dir=Path("l"),
            checkpoint_dir=Path("c"),
            restarts=0,
            server_return_s=7.5,
            secret_file=Path("secret"),
            port=7000,
            timeout_s=9.5,
            grace_s=2.0,
            threads=1,
        )
    ]


def test_servers_may_run_the_script_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Job] = []
    monkeypatch.setattr(command, "launch", lambda asked: launched.append(asked) or 0)  # type: ignore[func-returns-value]
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "--servers-run-script", "train.py", "--mode", "pserver"]) == 0
    (asked,) = launched
    assert asked.server == asked.trainer == (sys.executable, "train.py", "--mode", "pserver")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["nowhere.py"], "there is no script nowhere.py"),
        (["-m", "nowhere_at_all.train"], "there is no module nowhere_at_all.train"),
        (["--trainers", "0", "here.py"], "trainers is 0"),
        (["--servers", "-1", "here.py"], "servers is -1"),
        (["--restarts", "-1", "here.py"], "restarts is -1"),
        (["--port", "70000", "here.py"], "port is 70000"),
        (["--timeout", "nan", "here.py"], "timeout_s is nan"),
        (["--server-return", "-1", "here.py"], "server_return_s is -1"),
        (["--grace", "inf", "here.py"], "grace_s is inf"),
        (["--threads", "0", "here.py"], "threads is 0"),
        (["--secret-file", "none", "here.py"], "there is no secret file none"),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_starts(
    *,
    tmp_path: Path,
    jobs: list[Job],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    what: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").touch()
    assert main(["launch", *words]) == 2
    assert what in capsys.readouterr().err
    assert not jobs


def test_a_job_needs_commands() -> None:
    with pytest.raises(StrategyError, match="needs a command"):
        Job(trainer=())


@pytest.mark.processes
def test_each_process_reads_its_role(capsys: pytest.CaptureFixture[str]) -> None:
    here = str(Path(__file__).parents[2])
    only_env = f"import sys; sys.path.insert(0, {here!r})\n" + ROLE
    roles = (sys.executable, "-c", only_env)
    wide = replace(job("pass", servers=2, trainers=2, name="a job"), trainer=roles, server=roles)
    assert read_cluster() is None
    assert launch(replace(wide, grace_s=20.0)) == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    assert len(lines) == 4
    for at, line in enumerate(lines):
        role = "pserver" if at < 2 else "trainer"
        assert line.startswith(f"{role.removeprefix('p')} {at % 2}")
        assert f"role='{role}', trainers=2" in line
        assert "job='a job'" in line
        assert ("checkpoint_dir=PosixPath" in line) == (role == "pserver")
        assert ("trainer_id=None" in line) == (role == "pserver")
        assert "server_return_s=60.0" in line


@pytest.mark.processes
def test_threads_are_limited_on_request_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NPROC", raising=False)
    code = "import os; print(os.environ.get('NPROC'), os.environ['PYTHONUNBUFFERED'])"
    assert launch(job(code, "pass")) == 0
    assert launch(job(code, "pass", threads=1)) == 0
    assert capsys.readouterr().out.splitlines() == ["trainer 0 | None 1", "trainer 0 | 1 1"]
