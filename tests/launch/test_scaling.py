"""`jaxfleet scale` changes the trainers of a launch; a launch goes on without those that die."""

import os
import re
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jaxfleet.cli import main
from jaxfleet.errors import StrategyError
from jaxfleet.launch import Job, Nodes, control, launch, scaling
from jaxfleet.launch.control import NAME, ControlSocket
from jaxfleet.launch.scaling import JobNow
from tests.launch.jobs import job, noted, noting, wait_until

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives tests a folder of temporary files without the jobs of others."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def listening(
    folder: Path, name: str, scale: Callable[[int | None, int | None], str] = "now {}".format
) -> Iterator[Path]:
    made = folder / f"jaxfleet-{name}"
    made.mkdir(mode=0o700)
    listener = ControlSocket(made, name, scale)
    try:
        yield made
    finally:
        listener.close()


def scaled(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Returns the status of `jaxfleet scale`, and what it printed."""
    status = main(["scale", *words])
    out, err = capsys.readouterr()
    return status, out + err


def test_the_only_job_is_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with listening(folder, "one"):
        assert scaled(capsys, "--trainers", "3") == (0, "now 3\n")
        assert scaled(capsys, "--trainers", "5", "--job", "one") == (0, "now 5\n")


def test_a_refusal_comes_back_with_its_hint(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(trainers: int | None, servers: int | None) -> str:
        assert servers is None
        raise StrategyError(f"{trainers} are too many", hint="take fewer")

    with listening(folder, "one", refuse):
        status, text = scaled(capsys, "--trainers", "3")
    assert status == 2
    assert text.splitlines() == ["error: 3 are too many", "  hint: take fewer"]


def test_without_a_job_nothing_is_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = scaled(capsys, "--trainers", "3")
    assert status == 2
    assert "error: this user runs no job with servers on this machine" in text
    # A launch that was killed leaves its socket, for a moment.
    with listening(folder, "dead") as made:
        pass
    assert (made / NAME).exists()
    assert "this user runs no job" in scaled(capsys, "--trainers", "3")[1]


def test_one_of_several_jobs_is_chosen_by_its_name(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening(folder, "one"), listening(folder, "two", "of two: {}".format):
        status, text = scaled(capsys, "--trainers", "3")
        assert status == 2
        assert "this user runs several jobs: one, two" in text
        assert scaled(capsys, "--trainers", "3", "--job", "two") == (0, "of two: 3\n")
        text = scaled(capsys, "--trainers", "3", "--job", "six")[1]
        assert "this user runs no job 'six' here" in text
        assert "there is one, two" in text


def test_a_folder_that_others_can_change_is_not_trusted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening(folder, "open") as made:
        made.chmod(0o777)
        assert "this user runs no job" in scaled(capsys, "--trainers", "3")[1]


@pytest.mark.parametrize("number", ["0", "-1", "1025"])
def test_a_number_that_no_job_can_have_is_refused_at_once(
    number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = scaled(capsys, "--trainers", number)
    assert status == 2
    assert f"trainers is {number}" in text
    assert "from 1 to 1024" in text


@pytest.mark.parametrize("line", [b"no json\n", b"[]\n", b'{"trainers": true}\n', b"\xff\n", b""])
def test_a_malformed_request_does_not_end_the_socket(
    line: bytes, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with listening(folder, "one") as made:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(made / NAME))
            connection.sendall(line)
        assert scaled(capsys, "--trainers", "3") == (0, "now 3\n")


def test_a_launch_that_ends_while_it_is_asked_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = folder / "jaxfleet-one"
    made.mkdir(mode=0o700)
    ended = threading.Event()
    with socket.socket(socket.AF_UNIX) as launch_socket:
        launch_socket.bind(str(made / NAME))
        launch_socket.listen()

        def greet() -> None:
            connection, _ = launch_socket.accept()
            with connection:
                connection.sendall(b'{"job": "one"}\n')
            ended.set()

        write = control._write  # noqa: SLF001
        monkeypatch.setattr(control, "_write", lambda *given: (ended.wait(60), write(*given)))
        threading.Thread(target=greet, daemon=True).start()
        status, text = scaled(capsys, "--trainers", "3")
    assert status == 2
    assert text.startswith("error: the launch of job 'one' did not answer")


def test_a_connection_that_asks_nothing_keeps_no_other_waiting(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(control, "_REQUEST_S", 600.0)
    with listening(folder, "one") as made, socket.socket(socket.AF_UNIX) as idle:
        idle.connect(str(made / NAME))
        assert idle.recv(1) == b"{"
        assert scaled(capsys, "--trainers", "3") == (0, "now 3\n")


def test_any_error_of_a_launch_is_answered(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(trainers: int | None, _servers: int | None) -> str:
        raise ImportError(f"no zmq for {trainers}")

    with listening(folder, "one", fail):
        for _ in range(2):
            assert scaled(capsys, "--trainers", "3") == (2, "error: no zmq for 3\n")


# --- a launch -------------------------------------------------------------------------------------

# Notes itself, and whether it joins; leaves at SIGTERM; ends when a file is there.
TRAINS = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
number, joins = os.environ["PADDLE_TRAINER_ID"], os.environ.get("JAXFLEET_JOINS", "0")
print("trains", number, joins, os.environ["PADDLE_TRAINERS_NUM"], flush=True)
while not pathlib.Path({folder!r}, "end").exists():
    time.sleep(0.02)
"""


# One that joins ends with an error once the server has ended, and its launch has seen that.
OUTLASTS = """
(server,) = pathlib.Path({folder!r}).glob("pserver-*")
while joins == "1":
    try:
        os.kill(int(server.name.rpartition("-")[2]), 0)
    except ProcessLookupError:
        sys.exit(1)
    time.sleep(0.02)
"""
WAITS_FOR_THE_END = """
while joins == "1":
    if pathlib.Path(os.environ["JAXFLEET_MEETING_DIR"], "ended").exists():
        sys.exit(1)
    time.sleep(0.02)
"""


@contextmanager
def asking(*steps: Callable[[], None]) -> Iterator[list[BaseException]]:
    """Runs steps in a thread, beside a launch in this one; keeps what they raise."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            for step in steps:
                step()
        except BaseException as error:  # noqa: BLE001  # fails the test, below
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield raised
    thread.join()
    assert not raised, raised


def trainers(folder: Path) -> set[int]:
    """Returns the numbers of the trainers that run."""
    found = set()
    for path in (folder / "pids").glob("trainer-*"):
        number, pid = path.name.split("-")[1:]
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            continue
        found.add(int(number))
    return found


def pid_of(folder: Path, number: int) -> int:
    (path,) = (folder / "pids").glob(f"trainer-{number}-*")
    return int(path.name.rpartition("-")[2])


def has(folder: Path, *numbers: int) -> Callable[[], None]:
    return lambda: wait_until(lambda: trainers(folder) == {*numbers}, f"trainers {numbers}")


def scales(number: int, status: int = 0) -> Callable[[], None]:
    def scale() -> None:
        assert main(["scale", "--trainers", str(number)]) == status

    return scale


def kills(folder: Path, number: int) -> Callable[[], None]:
    return lambda: os.kill(pid_of(folder, number), signal.SIGKILL)


def ends(folder: Path) -> Callable[[], None]:
    return (folder / "end").touch


@pytest.fixture
def script(folder: Path) -> str:
    (folder / "pids").mkdir()
    return noting(folder / "pids") + TRAINS.format(folder=str(folder))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets a test say what server 0 answers."""

    def set_to(
        trainers: int = 2, rows: int = 12, *, leaves: bool = True, goes_on: bool = True
    ) -> None:
        found = JobNow(trainers, rows, leaves, goes_on)
        monkeypatch.setattr(scaling, "ask_server", lambda *_: found)

    set_to()
    return set_to


@pytest.mark.usefixtures("now")
def test_two_then_four_then_one_then_three_trainers_run(
    folder: Path, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = (
        *(has(folder, 0, 1), scales(4), has(folder, 0, 1, 2, 3), scales(1), has(folder, 0)),
        *(scales(1), scales(3), has(folder, 0, 4, 5), ends(folder)),
    )
    logs = folder / "logs"
    with asking(*steps):
        assert launch(job(script, trainers=2, log_dir=logs, grace_s=0.2)) == 0
    out, err = capsys.readouterr()
    begun = sorted(line.partition("| ")[2] for line in out.splitlines() if "trains" in line)
    assert begun == [f"trains {n} {int(n > 1)} 2" for n in range(6)]
    assert "trainer 2 and trainer 3 are to join job" in out
    assert "trainer 1, trainer 2 and trainer 3 are to leave job" in out
    assert "has 1 trainer already" in out
    assert len(re.findall(r"trainer [123] ended well: it has left the job", err)) == 3
    assert (logs / "trainer-5.log").read_text() == "trains 5 1 2\n"


@pytest.mark.parametrize(
    ("said", "number", "what"),
    [
        ({"leaves": False}, 1, "SIGTERM would kill the trainers of job 'x', not let them leave"),
        ({"rows": 16}, 3, "a batch of 16 rows cannot be divided among 3 trainers"),
        ({"trainers": 0}, 4, "job 'x' has not begun its first step"),
    ],
)
def test_what_the_job_does_not_allow_changes_nothing(
    *,
    said: dict[str, int],
    number: int,
    what: str,
    folder: Path,
    script: str,
    now: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    now(**said)
    steps = has(folder, 0, 1), scales(number, status=2), has(folder, 0, 1), ends(folder)
    with asking(*steps):
        assert launch(job(script, trainers=2, name="x", grace_s=0.2)) == 0
    out, err = capsys.readouterr()
    assert f"error: {what}" in err
    assert out.count("trains") == 2


@pytest.mark.grid
def test_a_server_that_is_silent_is_named(
    folder: Path,
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(scaling, "_SERVER_S", 0.2)
    with asking(has(folder, 0), scales(2, status=2), ends(folder)):
        assert launch(job(script, grace_s=0.2)) == 0
    assert re.search(r"error: server 0 at \S+ did not answer", capsys.readouterr().err)


@pytest.mark.usefixtures("now")
def test_a_job_goes_on_without_dead_trainers_while_enough_are_left(
    folder: Path, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = has(folder, 0, 1, 2), kills(folder, 0), has(folder, 1, 2), ends(folder)
    with asking(*steps):
        assert launch(job(script, trainers=3, min_trainers=2, grace_s=0.2)) == 0
    assert "the job goes on with 2 trainers" in capsys.readouterr().err


@pytest.mark.grid
@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"goes_on": False}, "its strategy.on_trainer_lost is not 'continue'"),
        ({"trainers": 0}, "its first step has not begun"),
    ],
)
def test_a_job_that_cannot_go_on_ends_at_once(
    *,
    said: dict[str, int],
    why: str,
    folder: Path,
    script: str,
    now: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    now(**said)
    with asking(has(folder, 0, 1), kills(folder, 1)):
        assert launch(job(script, trainers=2, min_trainers=1, grace_s=0.2)) == 137
    assert f"the job cannot go on without trainer 1: {why}" in capsys.readouterr().err


@pytest.mark.grid
@pytest.mark.usefixtures("now")
def test_one_trainer_too_few_ends_the_job_with_its_status(
    folder: Path, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = has(folder, 0, 1, 2), kills(folder, 0), has(folder, 1, 2), kills(folder, 2)
    with asking(*steps):
        assert launch(job(script, trainers=3, min_trainers=2, grace_s=0.2)) == 137
    assert "trainer 2 killed by SIGKILL" in capsys.readouterr().err


@pytest.mark.grid
@pytest.mark.usefixtures("now")
def test_a_dead_trainer_of_such_a_job_joins_when_it_is_started_again(
    folder: Path, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def comes_again() -> None:
        lives = (folder / "pids").glob
        wait_until(lambda: len(list(lives("trainer-1-*"))) == 2, "the next life of trainer 1")

    with asking(has(folder, 0, 1), kills(folder, 1), comes_again, ends(folder)):
        asked = job(script, trainers=2, min_trainers=1, trainer_restarts=1, grace_s=0.2)
        assert launch(asked) == 0
    assert "trains 1 1 2" in capsys.readouterr().out


@pytest.mark.grid
@pytest.mark.usefixtures("now")
def test_a_job_goes_on_without_a_trainer_that_was_added_and_died(
    folder: Path, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = has(folder, 0), scales(2), has(folder, 0, 1), kills(folder, 1), has(folder, 0)
    with asking(*steps, ends(folder)):
        assert launch(job(script, grace_s=0.2)) == 0
    assert "the job goes on with 1 trainer\n" in capsys.readouterr().err


@pytest.mark.grid
@pytest.mark.usefixtures("now")
@pytest.mark.parametrize("waits", [OUTLASTS, WAITS_FOR_THE_END], ids=["server", "job"])
@pytest.mark.parametrize("restarts", [0, 2])
def test_a_trainer_that_comes_too_late_to_join_is_no_failure(
    restarts: int, waits: str, folder: Path, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    late = script + waits.replace("{folder!r}", repr(str(folder / "pids")))
    server = noting(folder / "pids") + (
        f"import pathlib, time\nwhile not pathlib.Path({str(folder)!r}, 'end').exists():\n"
    )
    with asking(has(folder, 0), scales(2), has(folder, 0, 1), ends(folder)):
        serves = server + "    time.sleep(0.02)"
        assert launch(job(late, serves, grace_s=5.0, trainer_restarts=restarts)) == 0
    err = capsys.readouterr().err
    assert re.search(r"trainer 1 ended .* 1 after .*; the job was done", err)
    assert "started again" not in err


@pytest.mark.grid
def test_a_job_that_starts_again_has_the_trainers_that_were_asked_for(
    folder: Path, script: str, now: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    now()
    code = script + 'sys.exit(os.environ.get("JAXFLEET_RESTART", "0") == "0" and number == "0")'
    with asking(has(folder, 0), scales(2), has(folder, 0, 1), ends(folder)):
        assert launch(job(code, max_restarts=1, grace_s=0.2)) == 0
    assert capsys.readouterr().out.count("trains 1 0 2") == 1


def test_launches_of_several_machines_do_not_count_the_trainers_of_others() -> None:
    nodes = Nodes(("a", "b"), "a")
    with pytest.raises(StrategyError, match="does not see how many trainers of other machines"):
        Job(trainer=("x",), trainers=4, min_trainers=2, nodes=nodes, insecure=True)


@pytest.mark.grid
def test_a_launch_leaves_no_control_socket(folder: Path) -> None:
    assert launch(job(noting(folder), name="x")) == 0
    assert len(noted(folder)) == 1
    assert not list(folder.glob(f"jaxfleet-*/{NAME}"))
