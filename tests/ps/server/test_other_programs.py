"""Programs that differ are reported by their first differing line; ports do not count."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet.ps.server import ServerOptions
from jaxfleet.runtime.pserver_job import JobPrograms, job_programs
from jaxfleet.runtime.simulated_job import Twin
from jaxfleet.transport.consistency import mask_endpoints, pack_text, text_digest, unpack_text
from jaxfleet.transport.messages import Kind, Message
from tests.faults import training
from tests.ps.server.common import ENDPOINT, SGD, Bench, error_of, hello, sgd_state

ELSEWHERE = "127.0.0.1:9009"
OTHER = SGD.replace("0.5:f32", "0.25:f32")


def come(bench: Bench, trainer: int, text: str, **said: Any) -> Message:
    """Sends a trainer's hello with the text of its programs."""
    packed = pack_text(text)
    assert packed is not None
    body = hello(trainer, program=text_digest(text), **said)
    return bench.one(trainer, Kind.HELLO, body=body, arrays={"program": packed})


def test_the_first_line_that_differs_is_shown_and_the_versions() -> None:
    bench = Bench()
    come(bench, 0, SGD, versions="jaxfleet 0.3, jax 0.10.2")
    refused = come(bench, 1, OTHER, versions="jaxfleet 0.3, jax 0.9.0")
    _, text = error_of(refused)
    assert "s0: f32[4,2] = jax.mul(w@GRAD.block0, 0.25:f32)' there, and here 's0" in text
    assert text.endswith("it runs jaxfleet 0.3, jax 0.9.0, and trainer 0 jaxfleet 0.3, jax 0.10.2")
    assert text_digest(SGD) not in text


def test_other_versions_alone_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    for trainer in (0, 1, 0, 1):
        come(bench, trainer, SGD, versions=f"jax 0.{trainer}", session=f"{trainer}")
    (record,) = caplog.records
    assert record.getMessage() == "jaxfleet: trainer 1 runs jax 0.1, and trainer 0 jax 0.0"


@pytest.mark.parametrize("packed", [np.ones(9, np.uint8), np.ones(2, np.float32)])
def test_a_text_that_is_none_is_left_out(packed: np.ndarray) -> None:
    bench = Bench()
    come(bench, 0, SGD)
    body = hello(1, program="other")
    _, text = error_of(bench.one(1, Kind.HELLO, body=body, arrays={"program": packed}))
    assert text.endswith("and trainer 0 reports " + text_digest(SGD)[:12] + "...")


def launched(folder: Path, endpoint: str, text: str) -> tuple[Bench, Message]:
    """Starts or restarts a server, and lets both trainers arrive."""
    options = ServerOptions(server=0, checkpoint_dir=folder)
    bench = Bench(options, endpoint=endpoint)
    moved = text.replace(ENDPOINT, endpoint)
    same = mask_endpoints(moved, [endpoint])
    answer = come(bench, 0, same, servers=[endpoint])
    if answer.kind is Kind.WELCOME:
        come(bench, 1, same, servers=[endpoint])
        answer = bench.one(0, Kind.DEFINE, body={"program": moved})
    return bench, answer


def test_a_job_goes_on_from_its_checkpoints_where_its_servers_listen_elsewhere(
    tmp_path: Path,
) -> None:
    bench, answer = launched(tmp_path, ENDPOINT, SGD)
    assert answer.kind is Kind.OK
    assert bench.one(0, Kind.ASSIGN, 0, {"replace": False}, sgd_state()).kind is Kind.OK
    again, answer = launched(tmp_path, ELSEWHERE, SGD)
    assert answer.kind is Kind.OK
    assert again.core.step == 0
    _, refused = launched(tmp_path, ELSEWHERE, OTHER)
    assert "0.25:f32)' there, and here 's0" in error_of(refused)[1]


def test_the_digest_of_a_job_has_no_ports() -> None:
    strategy = training.strategy(training.arguments([]))
    example = training.start("plain"), next(training.batches(1))
    captured = Twin(training.make_step("plain"), example, strategy).captured

    def made(*endpoints: str) -> JobPrograms:
        return job_programs(captured.program, strategy, trainer=0, trainers=2, endpoints=endpoints)

    one, other = made("a:1", "a:2"), made("b:70", "c:9")
    assert one.digest == other.digest
    assert one.digest != made("a:1").digest
    assert "pserver0" in one.text


def test_no_text_makes_a_server_unpack_more_than_it_can_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = pack_text("x" * 5000)
    assert packed is not None
    assert unpack_text(packed) == "x" * 5000
    monkeypatch.setattr("jaxfleet.transport.consistency._MOST_BYTES", 1000)
    assert unpack_text(packed) is None
