"""A server writes and reads checkpoints only below its configured folders."""

from pathlib import Path

import pytest

from jaxfleet.errors import StrategyError
from jaxfleet.ps.server import ServerOptions
from jaxfleet.ps.server.process import serve
from jaxfleet.transport.messages import Kind, Plain
from tests.ps.server.common import SGD, Bench, error_of, hello, sgd_state
from tests.ps.server.table_programs import table_program


def bench(root: Path) -> Bench:
    made = Bench(ServerOptions(save_dirs=(root,))).started(SGD, sgd_state())
    made.core.run_tasks()
    return made


def outside(folder: Path) -> list[str]:
    """Returns paths outside `folder / "jobs"`, in various spellings."""
    root = folder / "jobs"
    root.mkdir()
    (root / "link").symlink_to(folder / "elsewhere")
    return [
        str(folder / "elsewhere"),
        str(root / ".." / "elsewhere"),
        str(root / "link" / "x"),
        str(folder / "jobs2"),
        "/",
        "relative",
    ]


@pytest.mark.parametrize("kind", [Kind.SAVE, Kind.LOAD])
def test_a_path_outside_the_folders_is_refused_however_it_is_written(
    tmp_path: Path, kind: Kind
) -> None:
    paths = outside(tmp_path)
    served = bench(tmp_path / "jobs")
    for path in paths:
        answer = served.one(0, kind, 0, {"path": path})
        code, what = error_of(answer)
        assert code == "checkpoint", path
        assert str(tmp_path / "jobs") in what
        assert "--save-dir" in str(answer.body["hint"])
        assert not served.core.take_tasks()
    assert not (tmp_path / "elsewhere").exists()


def table_bench(root: Path) -> Bench:
    made = Bench(ServerOptions(save_dirs=(root,)))
    made.one(0, Kind.HELLO, body=hello(0, trainers=1))
    program = str(table_program(trainers=1))
    assert made.one(0, Kind.DEFINE, body={"program": program}).kind is Kind.OK
    assert made.one(0, Kind.ASSIGN, 0, {"replace": False}).kind is Kind.OK
    return made


def refill(folder: str) -> dict[str, Plain]:
    return {"table": "users", "token": f"refill from {folder}", "refill": folder}


def test_rows_of_a_table_are_read_below_the_folders_alone(tmp_path: Path) -> None:
    paths = outside(tmp_path)
    served = table_bench(tmp_path / "jobs")
    for path in paths:
        answer = served.one(0, Kind.SHRINK, 0, refill(path))
        code, what = error_of(answer)
        assert code == "checkpoint", path
        assert f"servers read checkpoints below {tmp_path / 'jobs'} alone" in what
        assert not served.core.take_tasks()
    _, what = error_of(served.one(0, Kind.SHRINK, 0, refill(str(tmp_path / "jobs" / "none"))))
    assert "alone" not in what  # below the folder: looked for, and missing


def test_a_table_is_cleared_whatever_the_folders_are(tmp_path: Path) -> None:
    assert table_bench(tmp_path).one(0, Kind.SHRINK, 0, refill("")).kind is Kind.OK


def test_a_path_that_is_no_path_is_refused(tmp_path: Path) -> None:
    served = bench(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in ("a\0b", "x" * 100_000, str(tmp_path / "loop")):
        assert error_of(served.send(0, Kind.SAVE, 0, {"path": path}))[0] in {
            "bad_message",
            "checkpoint",
        }
    assert not served.core.take_tasks()


def test_a_path_below_a_folder_is_written(tmp_path: Path) -> None:
    served = bench(tmp_path)
    body: dict[str, Plain] = {"path": str(tmp_path / "a" / "saved")}
    assert served.one(0, Kind.SAVE, 0, body).kind is Kind.OK
    assert any((tmp_path / "a" / "saved").iterdir())


def test_a_server_without_a_secret_is_refused_unless_it_is_meant() -> None:
    with pytest.raises(StrategyError, match="has no secret: every user") as caught:
        serve("127.0.0.1:0", ServerOptions())
    for way in ("jaxfleet launch", "JAXFLEET_SECRET_FILE", "JAXFLEET_INSECURE=1"):
        assert way in caught.value.__notes__[0]
