"""Metrics that a server publishes about itself and about what trainers report."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet.observability import Sample, scrape
from jaxfleet.observability.trainer_metrics import TrainerMetrics
from jaxfleet.ps.server.metrics import MetricsExporter, ServerMetrics
from jaxfleet.transport.messages import Kind
from tests.ps.server.common import SGD, Bench, hello, sgd_state
from tests.ps.server.table_programs import USERS, table_program


def metrics_of(bench: Bench) -> ServerMetrics:
    return bench.core.metrics(bench.now)


def of_trainer(bench: Bench, number: int = 0) -> TrainerMetrics:
    return {one.number: one for one in metrics_of(bench).trainers}[number]


def beat(bench: Bench, **body: Any) -> TrainerMetrics:
    bench.one(0, Kind.HEARTBEAT, body={"doing": "step 3", **body})
    return of_trainer(bench)


def test_a_heartbeat_reports_memory_and_scalars() -> None:
    bench = Bench().started(SGD, sgd_state())
    scalars = {"loss": math.nan, "eval/top1": 1}
    found = beat(bench, resident=5 << 20, scalar_step=7, scalars=scalars)
    assert (found.resident_bytes, found.scalar_step) == (5 << 20, 7)
    assert found.scalars.keys() == scalars.keys()
    assert math.isnan(found.scalars["loss"])


def test_an_activity_is_kept_without_what_a_terminal_would_obey() -> None:
    bench = Bench().started(SGD, sgd_state())
    bench.one(0, Kind.HEARTBEAT, body={"doing": "\x1b[2J" + "x" * 500})
    assert of_trainer(bench).doing == "?[2J" + "x" * 193 + "..."


def test_a_trainer_is_connected_until_its_connections_end() -> None:
    bench = Bench().started(SGD, sgd_state())
    bench.core.disconnected([b"another"])
    bench.wait(4.0)
    assert of_trainer(bench).is_connected
    bench.core.disconnected([b"0"])
    bench.one(0, Kind.HEARTBEAT, body={"doing": "step 3"})  # which was under way
    bench.wait(4.0)
    assert not of_trainer(bench).is_connected
    assert scraped(metrics_of(bench)).of_trainers[0]["trainer_connected"] == 0
    bench.now += 3600.0
    bench.one(0, Kind.HELLO, body=hello(0, session="b"))
    assert of_trainer(bench).is_connected


def test_a_trainer_between_two_connections_whose_heartbeats_arrive_has_not_died() -> None:
    bench = Bench()
    for trainer in range(2):
        bench.one(trainer, Kind.HELLO, body=hello(trainer, session="a"))
    bench.core.disconnected([b"0"])
    for _ in range(60):  # it computes, and connects anew when it next waits
        assert of_trainer(bench).is_connected
        bench.wait(1.0)
        bench.one(0, Kind.HEARTBEAT, body={"session": "a"}, peer=b"beats")
    bench.one(0, Kind.HELLO, body=hello(0, session="a"), peer=b"new")
    bench.core.disconnected([b"0"])  # also if the end is seen after the hello
    bench.wait(10.0)
    assert of_trainer(bench).is_connected
    bench.core.disconnected([b"new"])
    bench.wait(4.0)
    assert not of_trainer(bench).is_connected


def test_a_trainer_whose_connections_have_all_ended_has_died_at_once() -> None:
    bench = Bench()
    for trainer in range(2):
        bench.one(trainer, Kind.HELLO, body=hello(trainer, session="a"))
    bench.one(0, Kind.HEARTBEAT, body={"session": "a"}, peer=b"beats")
    bench.core.disconnected([b"beats", b"0"])
    assert not of_trainer(bench).is_connected
    bench.one(0, Kind.HEARTBEAT, body={"session": "a"}, peer=b"later")
    assert of_trainer(bench).is_connected


def test_a_server_that_was_suspended_waits_for_heartbeats_of_a_lost_connection() -> None:
    bench = Bench().started(SGD, sgd_state())
    bench.core.disconnected([b"0"])
    bench.now += 60.0
    bench.core.forgive(60.0)
    assert of_trainer(bench).is_connected


def test_rows_of_tables_count_as_applied() -> None:
    served = Bench().started(str(table_program(trainers=1)), {}, 1)
    keys = np.arange(5)
    arrays: dict[str, np.ndarray] = {"keys": keys, "grads": np.ones((5, USERS.dim), np.float32)}
    served.send(0, Kind.PUSH_ROWS, 1, {"table": USERS.name}, arrays)
    assert scraped(metrics_of(served)).values["applied_rows_total"] == 5


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"resident": "much", "scalar_step": 2.5, "scalars": ["loss"]},
        {"resident": -1, "scalar_step": -1, "scalars": {"loss": "low", "x" * 300: 1.0}},
        {"scalars": {"two\nlines": 1.0}},
    ],
)
def test_a_malformed_report_is_left_out(body: dict[str, Any]) -> None:
    found = beat(Bench().started(SGD, sgd_state()), **body)
    assert (found.resident_bytes, found.scalar_step, dict(found.scalars)) == (0, 0, {})
    assert found.doing == "step 3"


def test_a_trainer_publishes_a_bounded_number_of_scalars() -> None:
    scalars = {f"metric {number}": float(number) for number in range(10_000)}
    found = beat(Bench().started(SGD, sgd_state()), scalars=scalars)
    assert 32 <= len(found.scalars) <= 64


def test_another_process_of_a_trainer_is_counted_and_a_new_connection_is_not() -> None:
    bench = Bench().started(SGD, sgd_state())
    for session, joins in ((None, 1), ("a", 2), ("a", 2), ("b", 3)):
        bench.now += 3600.0  # the one before is lost by then
        bench.one(0, Kind.HELLO, body=hello(0, session=session))
        assert of_trainer(bench).joins == joins


def test_saves_are_counted_when_they_are_written(tmp_path: Path) -> None:
    bench = Bench().started(SGD, sgd_state())
    assert metrics_of(bench).counted["saves"] == 0
    bench.one(0, Kind.SAVE, 0, {"path": str(tmp_path / "saved")})
    assert metrics_of(bench).counted["saves"] == 1


def scraped(published: ServerMetrics) -> Sample:
    metrics = MetricsExporter()
    metrics.publish(published)
    try:
        return scrape(f"127.0.0.1:{metrics.start('127.0.0.1', 0)}")
    finally:
        metrics.close()


def test_a_scrape_has_memory_start_scalars_and_joins() -> None:
    bench = Bench().started(SGD, sgd_state())
    name = 'a "quoted"\\ <script>alert(1)</script> ü'
    beat(bench, resident=5 << 20, scalar_step=7, scalars={name: math.inf})
    found = scraped(metrics_of(bench))
    assert found.values["resident_bytes"] > 1 << 20  # of this process
    assert found.values["server_start_time_seconds"] > 1.7e9
    assert "checkpoint_step" not in found.values
    assert found.scalars == {0: {name: math.inf}}
    trainer = found.of_trainers[0]
    wanted = {"trainer_resident_bytes": 5 << 20, "trainer_scalar_step": 7, "trainer_lost": 0}
    assert wanted.items() <= trainer.items()
    assert trainer["trainer_joins_total"] == 1
