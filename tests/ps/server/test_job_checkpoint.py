"""A server's own checkpoints, and its part of the job's."""

from pathlib import Path

import numpy as np
import pytest

from jaxfleet.checkpoint import PartReceipt, Piece, commit, open_checkpoint, save_arrays, write_part
from jaxfleet.ps.server import ServerOptions
from jaxfleet.transport.messages import Kind
from tests.ps.server.common import (
    MOMENTUM,
    SGD,
    SGD_SHAPES,
    Bench,
    drawn,
    error_of,
    hello,
    sgd_after,
    sgd_grads,
    sgd_state,
)


def _step(bench: Bench, step: int) -> None:
    for trainer in (0, 1):
        bench.push(trainer, step, sgd_grads(trainer, step))


def test_a_server_that_starts_again_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    options = ServerOptions(server=0, checkpoint_dir=tmp_path)
    bench = Bench(options).started(SGD, sgd_state())
    _step(bench, 1)
    assert bench.one(0, Kind.SAVE, 1).kind is Kind.OK
    _step(bench, 2)
    again = Bench(options)
    body = again.one(0, Kind.HELLO, body=hello(0)).body
    assert (body["step"], body["defined"]) == (1, True)
    assert body["incarnation"] != bench.core.incarnation
    again.one(1, Kind.HELLO, body=hello(1))
    assert again.one(0, Kind.DEFINE, body={"program": SGD}).kind is Kind.OK
    for step in (2, 3):
        _step(again, step)
    values = again.pull(0, 3, *SGD_SHAPES)
    for name, wanted in sgd_after(3).items():
        np.testing.assert_array_equal(values[name], wanted)


def test_the_first_state_is_in_a_checkpoint(tmp_path: Path) -> None:
    options = ServerOptions(server=0, checkpoint_dir=tmp_path)
    Bench(options).started(SGD, sgd_state())
    assert Bench(options).one(0, Kind.HELLO, body=hello(0)).body["step"] == 0


def test_a_checkpoint_of_another_job_is_not_taken_up(tmp_path: Path) -> None:
    options = ServerOptions(server=0, checkpoint_dir=tmp_path)
    Bench(options).started(SGD, sgd_state())
    again = Bench(options)
    _, text = error_of(again.send(0, Kind.HELLO, body=hello(0, program="new")))
    assert text == "trainer 0 reports program new, and the server abc"


def test_a_save_waits_for_its_step(tmp_path: Path) -> None:
    bench = Bench().started(SGD, sgd_state())
    bench.push(0, 1, sgd_grads(0, 1))
    assert not bench.send(0, Kind.SAVE, 1, {"path": str(tmp_path)})
    ((_, reply),) = bench.push(1, 1, sgd_grads(1, 1))
    assert reply.kind is Kind.OK
    assert reply.body["step"] == 1


def test_a_part_holds_whole_leaves_by_rows(tmp_path: Path) -> None:
    bench = Bench().started(SGD, sgd_state())
    _step(bench, 1)
    reply = bench.one(0, Kind.SAVE, 1, {"path": str(tmp_path)})
    receipt = reply.body["receipt"]
    assert isinstance(receipt, dict)
    commit(tmp_path, [PartReceipt.from_plain(receipt)], step=1)
    saved, wanted = open_checkpoint(tmp_path), sgd_after(1)
    assert saved.names() == ("b", "w")
    whole = np.concatenate([wanted["w.block0"], wanted["w.block1"]])
    np.testing.assert_array_equal(saved.read("w"), whole)


def test_a_checkpoint_is_loaded_however_it_was_cut(tmp_path: Path) -> None:
    w, m = drawn("w", 5, (7, 2)), drawn("m", 5, (7, 2))
    pieces = [Piece("w", w[:1], 0, (7, 2)), Piece("w", w[1:], 1, (7, 2)), Piece.whole("m/w", m)]
    pieces.append(Piece.whole("count", np.asarray(9, np.int32)))
    receipt = write_part(tmp_path, "server 0", pieces, step=9)
    commit(tmp_path, [receipt], step=9)
    bench = Bench()
    for trainer in (0, 1):
        bench.one(trainer, Kind.HELLO, body=hello(trainer))
    bench.one(0, Kind.DEFINE, body={"program": MOMENTUM})
    assert bench.one(0, Kind.LOAD, body={"path": str(tmp_path)}).body["step"] == 9
    values = bench.pull(1, 9, "w.block0", "w.block1", "m/w.block1", "count")
    np.testing.assert_array_equal(values["w.block1"], w[4:])
    np.testing.assert_array_equal(values["m/w.block1"], m[4:])
    assert values["count"] == 9


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    save_arrays(tmp_path / "c", {"w": np.zeros((7, 3), np.float32)}, step=3)
    bench = Bench().started(SGD, sgd_state())
    code, text = error_of(bench.send(0, Kind.LOAD, body={"path": str(tmp_path / "c")}))
    assert code == "checkpoint"
    assert "float32[4, 3]" in text
    _step(bench, 1)
    np.testing.assert_array_equal(bench.pull(0, 1, "b")["b"], sgd_after(1)["b"])


@pytest.mark.parametrize("path", ["/proc/nowhere/at/all", "/dev/null/x"])
def test_a_save_that_fails_is_an_error_for_who_asked(path: str) -> None:
    bench = Bench().started(SGD, sgd_state())
    code, _ = error_of(bench.send(0, Kind.SAVE, 0, {"path": path}))
    assert code == "checkpoint"
    assert not bench.core.finished
    _step(bench, 1)
    assert bench.core.step == 1


def test_after_a_load_the_checkpoints_of_later_steps_are_void(tmp_path: Path) -> None:
    options = ServerOptions(server=0, checkpoint_dir=tmp_path / "own")
    bench = Bench(options).started(SGD, sgd_state())
    _step(bench, 1)
    reply = bench.one(0, Kind.SAVE, 1, {"path": str(tmp_path / "at1")})
    receipt = PartReceipt.from_plain(reply.body["receipt"])  # type: ignore[arg-type]
    commit(tmp_path / "at1", [receipt], step=1)
    for step in (2, 3):
        _step(bench, step)
        assert bench.one(0, Kind.SAVE, step).kind is Kind.OK
    assert bench.one(0, Kind.LOAD, 0, {"path": str(tmp_path / "at1")}).body["step"] == 1
    assert Bench(options).core.step == 1
