"""A spare process waits for its role, takes it at once, and ends with its launch."""

import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from jaxfleet.cli import serve as serve_command
from jaxfleet.cli.app import make_parser
from jaxfleet.launch import launch, members, spares
from jaxfleet.launch.spares import Spares
from jaxfleet.launch.starter import SparesDue, Starter, starting
from jaxfleet.ps.server import process as server_process
from jaxfleet.ps.server.block_executor import BlockExecutor
from jaxfleet.ps.server.execution_plan import BlockPlan, SentGradients
from tests.launch.jobs import IDLE, job, python, runs, wait_until, waiting

pytestmark = pytest.mark.processes

# Waits for its role as `jaxfleet serve --standby` does, but imports nothing for it.
STANDS_BY = """
import json, os, sys
role = os.fdopen(int(sys.argv[-1])).read()
if not role:
    sys.exit()
os.environ.clear()
os.environ.update(json.loads(role))
"""
TAKES = STANDS_BY + "print('took', os.environ['ROLE'], os.environ.get('HOME'), flush=True)\n"


@contextmanager
def keeping(code: str, count: int = 1) -> Iterator[tuple[Starter, Spares]]:
    with starting(job("pass"), {"server 0": "log"}) as starter:
        kept = Spares(starter, python(code), {"HOME": "none"}, count=count)
        try:
            yield starter, kept
        finally:
            kept.close()


def test_a_spare_takes_a_role_and_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with keeping(TAKES) as (starter, kept):
        kept.start_missing()
        (waits,) = kept.processes
        assert starter.everybody == []  # it has no part in the job
        took = kept.take("server 0", {"ROLE": "x" * 2000})
        assert took is waits
        assert starter.everybody == [took]
        assert kept.processes == []
        assert kept.take("server 0", {"ROLE": "two"}) is None
        wait_until(lambda: took.gone, "its end")
        assert took.status == 0
    assert f"server 0 | took {'x' * 2000} None\n" in capsys.readouterr().out


def test_a_role_that_does_not_fit_into_the_pipe_is_left_to_a_cold_start() -> None:
    with keeping("import time; time.sleep(100)") as (_, kept):
        kept.start_missing()
        (waits,) = kept.processes
        assert kept.take("server 0", {"ROLE": "x" * 300_000}) is None
        wait_until(lambda: waits.gone, "its end")


def test_a_dead_spare_is_passed_over_and_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spares, "_AFTER_S", 0.0)
    with keeping("raise SystemExit(3)") as (starter, kept):
        kept.start_missing()
        (died,) = kept.processes
        wait_until(lambda: died.gone, "its end")
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        assert kept.take("server 0", {"ROLE": "one"}) is None
        assert len(os.listdir("/proc/self/fd")) == before - 1  # noqa: PTH208
        found = [starter.events.next(time.monotonic() + 5.0) for _ in range(3)]
        assert SparesDue() in found  # which starts another


def test_a_spare_without_a_role_ends_with_its_pipe() -> None:
    with keeping(TAKES) as (_, kept):
        kept.start_missing()
        (waits,) = kept.processes
        kept.close()
        wait_until(lambda: waits.gone, "its end")
        assert waits.status == 0
        assert waits.told is None


def test_spares_that_die_are_started_again_three_times_at_most(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spares, "_AFTER_S", 0.0)
    with keeping("raise SystemExit(3)") as (_, kept):
        for _ in range(3):
            kept.start_missing()
            (died,) = kept.processes
            wait_until(partial(getattr, died, "gone"), "its end")
            assert kept.has_ended(died)
        kept.start_missing()
        assert kept.processes == []
    assert "spare ended with exit code 3, as 3 of them" in capsys.readouterr().err


LAUNCHER = """
import sys, time
from jaxfleet.launch.spares import Spares
from jaxfleet.launch.starter import starting
from tests.launch.jobs import job, python
with starting(job("pass"), {}) as starter:
    kept = Spares(starter, python(sys.argv[1]), {}, count=1)
    kept.start_missing()
    print(kept.processes[0].pid, flush=True)
    time.sleep(100)
"""


def test_a_spare_ends_with_a_launch_that_is_killed() -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, STANDS_BY], stdout=subprocess.PIPE, text=True
    )
    with launcher:
        assert launcher.stdout is not None
        spare = int(launcher.stdout.readline())
        assert runs(spare)
        launcher.kill()
    wait_until(lambda: not runs(spare), "the spare's end")


def test_a_spare_becomes_the_server_that_died(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = f"""
import os, pathlib, signal, sys, time
here = pathlib.Path({str(tmp_path)!r})
if sys.argv[-2:-1] == ["--standby"]:
    (here / "spare").touch()
    {STANDS_BY.strip().replace(chr(10), chr(10) + "    ")}
    print("took", os.environ["PADDLE_CURRENT_ENDPOINT"], flush=True)
    (here / "done").mkdir()
    (here / "done" / "it").touch()
    {IDLE}
while not (here / "spare").exists():
    time.sleep(0.02)
print("first", os.environ["PADDLE_CURRENT_ENDPOINT"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    monkeypatch.setattr(members, "SERVE", python(server))
    monkeypatch.setattr(spares, "_AFTER_S", 0.1)
    monkeypatch.setattr(spares, "_MOST_DEATHS", 1)
    done = tmp_path / "done"
    trainer = f"import os, time\nwhile not os.path.isdir({str(done)!r}): time.sleep(0.02)\n"
    assert launch(job(trainer + waiting(done), server)) == 0
    out, err = capsys.readouterr()
    first, took = (line.split()[-1] for line in out.splitlines())
    assert first == took
    assert "it is started again (1 of 3)" in err
    assert err.count("server 0: process") == 2
    assert "spare" not in err


def test_serve_stands_by_until_it_has_a_role(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared: list[bool] = []
    monkeypatch.setattr(server_process, "prepare", lambda *, computes: prepared.append(computes))
    for role in (b"", b'{"NOT_A": "server"}'):
        theirs, ours = os.pipe()
        os.write(ours, role)
        os.close(ours)
        words = ["serve", "--standby", str(theirs)]
        args = make_parser(words).parse_args(words)
        before = dict(os.environ)
        try:
            if role:
                with pytest.raises(Exception, match="not a server of a job"):
                    serve_command.run(args)
                assert dict(os.environ) == {"NOT_A": "server"}
            else:
                assert serve_command.run(args) == 0
        finally:
            os.environ.clear()
            os.environ.update(before)
    assert len(prepared) == 2
    assert capsys.readouterr().out == ""


def test_a_server_is_prepared_by_running_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = io.StringIO()
    for name in ("keep_freed_memory", "compute_in_place"):  # settings of the whole process
        monkeypatch.setattr(server_process, name, lambda name=name: ran.write(f"{name} "))
    run = BlockExecutor.run

    def noted(self: BlockExecutor, block: BlockPlan, sent: SentGradients) -> object:
        ran.write("block ")
        return run(self, block, sent)

    monkeypatch.setattr(BlockExecutor, "run", noted)
    server_process.prepare(computes=False)
    assert ran.getvalue() == "keep_freed_memory compute_in_place "
    server_process.prepare(computes=True)
    assert ran.getvalue().endswith("compute_in_place block ")


def test_no_spare_is_kept_for_servers_that_run_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spares, "_AFTER_S", 0.0)
    starts: list[object] = []
    monkeypatch.setattr(Starter, "start_spare", lambda *args: starts.append(args))
    server = f"open({str(tmp_path / 'up')!r}, 'w')\n{IDLE}"
    assert launch(job(waiting(tmp_path), server)) == 0
    assert starts == []
