"""Rows deleted between two steps, on a server that may restart; exported rows."""

import errno
from pathlib import Path

import numpy as np
import pytest

from jaxfleet.checkpoint.saving import cannot_write
from jaxfleet.ps.server import ServerOptions
from jaxfleet.ps.server.checkpoints import RecoveryCheckpoints
from jaxfleet.tables import ByScore, TableSpec, TableStore
from jaxfleet.transport.messages import Kind
from tests.ps.server.common import Bench, error_of, hello
from tests.ps.server.table_programs import table_program

KEYS = np.arange(8)
SHOWS = np.array([1, 1, 1, 1, 8, 8, 8, 8], np.float32)
ONES = np.ones((8, 2), np.float32)
SPEC = TableSpec(
    name="users", dim=2, evictions=(ByScore(nonclk_coeff=1.0, decay=0.5, threshold=0.6),)
)


def started(folder: Path | None) -> Bench:
    bench = Bench(ServerOptions(server=0, checkpoint_dir=folder), "127.0.0.1:7001")
    said = hello(0, trainers=1, servers=["127.0.0.1:7001"])
    if not bench.one(0, Kind.HELLO, body=said).body["defined"]:
        program = str(table_program([SPEC], trainers=1))
        bench.one(0, Kind.DEFINE, body={"program": program})
        bench.one(0, Kind.ASSIGN, 0, {"replace": False})
    return bench


def push(bench: Bench, step: int) -> None:
    arrays: dict[str, np.ndarray] = {"keys": KEYS, "grads": ONES, "shows": SHOWS}
    assert not bench.send(0, Kind.PUSH_ROWS, step, {"table": "users"}, arrays)


def shrunk(bench: Bench, step: int, token: str) -> int:
    reply = bench.one(0, Kind.SHRINK, step, {"table": "users", "token": token})
    assert reply.kind is Kind.OK, reply
    count = reply.body["rows"]
    assert isinstance(count, int)
    return count


def rows(bench: Bench, step: int) -> tuple[list[int], bytes]:
    reply = bench.one(0, Kind.EXPORT, step, {"table": "users", "first": 0})
    keys, found = (tensor.array for tensor in reply.tensors)
    return keys.tolist(), found.tobytes()


def test_what_went_does_not_come_back_with_a_server_that_starts_again(tmp_path: Path) -> None:
    undisturbed, bench = started(None), started(tmp_path)
    for one in (undisturbed, bench):
        push(one, 1)
        assert shrunk(one, 1, "a") == 4
    again = started(tmp_path)
    push(again, 1)  # trainers resend their log; this is applied already
    assert shrunk(again, 1, "a") == 4  # the answer may have been lost: nothing decays twice
    assert rows(again, 1) == rows(undisturbed, 1)
    for one in (undisturbed, again):
        push(one, 2)
        assert [shrunk(one, 2, token) for token in ("b", "b", "c")] == [4, 4, 0]
    assert rows(again, 2) == rows(undisturbed, 2)


def test_a_server_that_had_not_kept_it_takes_the_same_rows_out_anew(tmp_path: Path) -> None:
    undisturbed, bench = started(None), started(tmp_path)
    push(undisturbed, 1)
    assert shrunk(undisturbed, 1, "a") == 4
    push(bench, 1)  # is lost, with everything of that time
    again = started(tmp_path)
    push(again, 1)
    assert shrunk(again, 1, "a") == 4
    assert rows(again, 1) == rows(undisturbed, 1)


def test_rows_that_go_while_the_disk_is_full_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = started(tmp_path)
    push(bench, 1)
    assert bench.one(0, Kind.SAVE, 1).body["step"] == 1

    def fail(*_: object, **__: object) -> None:
        error = OSError(errno.ENOSPC, "No space left on device")
        raise cannot_write("part 'server 0'", tmp_path, error) from error

    monkeypatch.setattr(RecoveryCheckpoints, "save", fail)
    replies = bench.send(0, Kind.SHRINK, 1, {"table": "users", "token": "a"})
    while not replies:
        bench.wait(2.1)
        replies = bench.core.run_tasks()
    _, what = error_of(replies[0][1])
    assert "No space left on device" in what
    assert bench.core.failure is not None


def test_it_waits_for_the_step_and_is_done_once_however_often_it_is_asked_for() -> None:
    bench, body = started(None), {"table": "users", "token": "a"}
    assert not bench.send(0, Kind.SHRINK, 1, dict(body), number=900)
    assert not bench.send(0, Kind.SHRINK, 1, dict(body), number=900)
    arrays: dict[str, np.ndarray] = {"keys": KEYS, "grads": ONES, "shows": SHOWS}
    (reply,) = bench.send(0, Kind.PUSH_ROWS, 1, {"table": "users"}, arrays)
    assert (reply[1].number, reply[1].body["rows"]) == (900, 4)


def test_all_rows_come_by_bucket_and_the_end_is_said() -> None:
    bench = started(None)
    push(bench, 1)
    found, _ = rows(bench, 1)
    store = TableStore(SPEC)
    store.update(KEYS, ONES)
    assert found == store.export()[0].tolist()
    last = bench.one(0, Kind.EXPORT, 1, {"table": "users", "first": 1024})
    assert (last.kind, last.body["next"], last.tensors) == (Kind.ROWS, None, ())


@pytest.mark.parametrize(
    ("kind", "body", "text"),
    [
        (Kind.SHRINK, {"table": "cars", "token": "a"}, "no table 'cars'"),
        (Kind.SHRINK, {"table": "users"}, "needs 'token'"),
        (Kind.EXPORT, {"table": "users"}, "'first', a bucket from 0 to 1024, and not None"),
        (Kind.EXPORT, {"table": "users", "first": -1}, "and not -1"),
    ],
)
def test_what_is_no_request_of_a_table_is_refused(
    kind: Kind, body: dict[str, str | int], text: str
) -> None:
    code, what = error_of(started(None).send(0, kind, 0, dict(body)))
    assert code == "bad_message"
    assert text in what
