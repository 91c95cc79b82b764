"""`jaxfleet scale --servers` starts servers of a launch, and lets the last ones go."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxfleet.cli import main
from jaxfleet.errors import StrategyError
from jaxfleet.launch import Job, Nodes, launch, server_scaling
from jaxfleet.launch.requests import Requests
from jaxfleet.launch.server_scaling import ServerScaling
from tests.launch.jobs import job, python, wait_until
from tests.launch.test_scaling import asking, ends, folder, has, now, script

__all__ = ["folder", "now", "script"]  # fixtures

pytestmark = pytest.mark.processes

# Notes itself; ends well when the job is done, or has moved to fewer servers.
SERVES = """
import os, pathlib, sys, time
folder, number = pathlib.Path({folder!r}), int(os.environ["PADDLE_PSERVER_ID"])
count = len(os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(","))
print("serves", number, "of", count, flush=True)
(folder / "serving").mkdir(exist_ok=True)
(folder / "serving" / f"{{number}}-{{os.getpid()}}").touch()
if number and (folder / "fails").exists():
    sys.exit(1)
while (number or not (folder / "end").exists()) and not (folder / f"left-{{number}}").exists():
    time.sleep(0.02)
"""


class Server0:
    """Server 0, of which tests decide what it answers."""

    def __init__(self) -> None:
        self.moved_to = 0  # servers
        self.refusal = ""
        self.asked: list[tuple[int, bool]] = []

    def __call__(
        self,
        _job: Job,
        endpoints: Sequence[str],
        folder: str,
        *,
        peek: bool = False,
        within_s: float,
    ) -> Mapping[str, object]:
        assert folder.endswith("/moving")
        assert within_s > 0.0
        self.asked.append((len(endpoints), peek))
        if self.refusal:
            raise StrategyError(self.refusal)
        return {"moved": self.moved_to == len(endpoints)}


@pytest.fixture
def server_0(monkeypatch: pytest.MonkeyPatch) -> Server0:
    found = Server0()
    monkeypatch.setattr(server_scaling, "ask_to_move", found)
    monkeypatch.setattr(server_scaling, "_END_S", 0.2)
    return found


@pytest.fixture
def serving(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the code of servers, which counts as that of jaxfleet's own."""
    code = SERVES.format(folder=str(folder))
    monkeypatch.setattr(server_scaling, "SERVE", python(code))

    def is_there(_job: Job, _endpoint: str, _within_s: float) -> Mapping[str, object] | None:
        return {} if len(serves(folder)) > 1 and not (folder / "fails").exists() else None

    monkeypatch.setattr(server_scaling, "ask_a_server", is_there)
    return code


def serves(folder: Path) -> set[int]:
    """Returns the numbers of the servers that run."""
    found = set()
    for path in (folder / "serving").glob("*"):
        number, pid = map(int, path.name.split("-"))
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        found.add(number)
    return found


def has_servers(folder: Path, *numbers: int) -> Callable[[], None]:
    return lambda: wait_until(lambda: serves(folder) == {*numbers}, f"servers {numbers}")


def scales(number: int, status: int = 0) -> Callable[[], None]:
    def scale() -> None:
        assert main(["scale", "--servers", str(number)]) == status

    return scale


def moves(server_0: Server0, number: int) -> Callable[[], None]:
    """Lets the job move, and waits until its launch reports it."""

    def move() -> None:
        server_0.moved_to = number
        wait_until(lambda: main(["scale", "--servers", str(number)]) == 0, "the launch to see it")

    return move


def leaves(folder: Path, *numbers: int) -> Callable[[], None]:
    def leave() -> None:
        for number in numbers:
            (folder / f"left-{number}").touch()

    return leave


def may_serve(folder: Path, *numbers: int) -> Callable[[], None]:
    def allow() -> None:
        for number in numbers:
            (folder / f"left-{number}").unlink()

    return allow


def test_one_then_three_then_one_then_two_servers_run(
    folder: Path, script: str, serving: str, server_0: Server0, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = (
        *(has(folder, 0), has_servers(folder, 0)),
        *(scales(3), has_servers(folder, 0, 1, 2), scales(1, status=2), moves(server_0, 3)),
        *(scales(1), leaves(folder, 1, 2), has_servers(folder, 0), moves(server_0, 1)),
        *(may_serve(folder, 1, 2), scales(2), has_servers(folder, 0, 1), moves(server_0, 2)),
        *(leaves(folder, 1), ends(folder)),
    )
    logs = folder / "logs"
    with asking(*steps):
        assert launch(job(script, serving, log_dir=logs, grace_s=2.0)) == 0
    out, err = capsys.readouterr()
    assert sorted(line.partition("| ")[2] for line in out.splitlines() if "serves" in line) == [
        *("serves 0 of 1", "serves 1 of 2", "serves 1 of 3", "serves 2 of 3")
    ]
    assert "is about to move to other servers already" in err
    for text in ("the job has 3 servers now", "the job has 1 server now", "has left the job"):
        assert text in err
    assert "is to go on with 3 servers after its next step" in out
    assert (logs / "server-2.log").read_text() == "serves 2 of 3\n"
    assert (3, True) in server_0.asked


def test_what_server_0_refuses_starts_nothing(
    folder: Path, script: str, serving: str, server_0: Server0, capsys: pytest.CaptureFixture[str]
) -> None:
    server_0.refusal = "job 'x': no server can be added or removed"
    with asking(has(folder, 0), has_servers(folder, 0), scales(2, status=2), ends(folder)):
        assert launch(job(script, serving, grace_s=2.0)) == 0
    out, err = capsys.readouterr()
    assert "error: job 'x': no server can be added or removed" in err
    assert out.count("serves") == 1


def test_a_job_goes_on_without_a_server_that_fails_to_start(
    folder: Path, script: str, serving: str, server_0: Server0, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = has(folder, 0), has_servers(folder, 0), (folder / "fails").touch, scales(2, status=2)
    with asking(*steps, has_servers(folder, 0), ends(folder)):
        assert launch(job(script, serving, grace_s=2.0)) == 0
    err = capsys.readouterr().err
    assert "the job goes on without it" in err
    assert "error: server 1 ended before it served" in err
    assert server_0.asked == [(2, True)]


@pytest.mark.usefixtures("server_0")
def test_a_job_that_is_done_before_it_moves_stops_the_new_servers(
    folder: Path, script: str, serving: str, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = has(folder, 0), has_servers(folder, 0), scales(2), has_servers(folder, 0, 1)
    with asking(*steps, ends(folder)):
        assert launch(job(script, serving, grace_s=2.0)) == 0
    assert "server 1 is stopped: the job is done" in capsys.readouterr().err


@pytest.mark.usefixtures("now")
def test_trainers_and_servers_are_asked_for_together(
    folder: Path, script: str, serving: str, server_0: Server0, capsys: pytest.CaptureFixture[str]
) -> None:
    def both(trainers: int, servers: int, status: int = 0) -> None:
        assert main(["scale", f"--trainers={trainers}", f"--servers={servers}"]) == status

    def refuse() -> None:
        server_0.refusal = "not now"

    steps = (
        *(has(folder, 0), has_servers(folder, 0), lambda: both(2, 2), has(folder, 0, 1)),
        *(has_servers(folder, 0, 1), moves(server_0, 2), refuse, lambda: both(3, 3, status=2)),
        *(has(folder, 0, 1, 2), leaves(folder, 1), ends(folder)),
    )
    with asking(*steps):
        assert launch(job(script, serving, grace_s=2.0)) == 0
    out, err = capsys.readouterr()
    assert "trainer 1 is to join job" in out
    assert "is to go on with 2 servers after its next step" in out
    assert "at a step; but not now" in err


def test_servers_that_run_a_script_are_as_many_as_they_are(
    folder: Path, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with asking(has(folder, 0), scales(2, status=2), ends(folder)):
        assert launch(job(script, grace_s=0.2)) == 0
    assert "has servers that run a script, whose number is fixed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"nodes": Nodes(("a", "b"), "a")}, "job 'x' runs on several machines"),
        ({"server_endpoints": ("a:1",)}, "job 'x' was given the endpoints of its servers"),
    ],
)
def test_servers_at_places_that_others_chose_are_as_many_as_they_are(
    options: dict[str, Any], what: str
) -> None:
    starter: Any = SimpleNamespace(console=None, events=None)
    fixed = Job(trainer=("x",), name="x", insecure=True, **options)
    members: Any = None
    scaling = ServerScaling(fixed, members, starter, Requests("x", starter.events))
    with pytest.raises(StrategyError, match=what):
        scaling.ask(2)


@pytest.mark.parametrize("words", [[], ["--servers", "0"], ["--servers", "2000"]])
def test_a_request_without_a_sound_number_is_refused_at_once(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["scale", *words]) == 2
    text = capsys.readouterr().err
    assert ("was given no number" if not words else f"servers is {words[1]}") in text
