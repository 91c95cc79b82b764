"""The history is bounded, and pages get only what is new."""

import math
from collections.abc import Iterator

from jaxfleet.board import Event, EventDetector, History, Series, Watch
from jaxfleet.board.watch import LEAST_EVERY_S, MOST_EVENTS, MOST_LISTED
from jaxfleet.observability import Board, Sample

A, B = "one:1", "two:2"


def sample(step: int = 5, *, started: float = 100.0, **trainer: float) -> Sample:
    values = {"server_step": float(step), "server_start_time_seconds": started}
    of_trainer = {"trainer_step": float(step), "trainer_silent_seconds": 0.1, **trainer}
    return Sample(1.0, values, {0: {"trainer_joins_total": 1.0, "trainer_left": 0.0, **of_trainer}})


def kinds(detector: EventDetector, *looks: dict[str, Sample | str]) -> list[str]:
    return [event.kind for look in looks for event in detector.look(1.0, look)]


def test_an_hour_of_many_series_stays_under_fifty_megabytes() -> None:
    history = History(int(3600 / LEAST_EVERY_S) + 1)
    many = {Series.of("scalar", "trainer 0", f"metric {n}"): float(n) for n in range(10_000)}
    for second in range(5):
        history.add(float(second), many)
    assert history.nbytes < 50e6
    assert len(history.series) + history.left_out == 10_000


def test_the_oldest_samples_make_room() -> None:
    history, steps = History(3), Series.of("steps", "server 0")
    for second in range(7):
        history.add(float(second), {steps: float(second)})
    assert list(history.rows(0, 100)) == [[4.0, 4.0], [5.0, 5.0], [6.0, 6.0]]
    assert list(history.rows(6, 100)) == [[6.0, 6.0]]
    full = history.nbytes
    history.add(7.0, {steps: math.inf})
    assert list(history.rows(7, 100)) == [[7.0, None]]
    assert history.nbytes == full


def test_a_server_dies_and_returns() -> None:
    detector = EventDetector()
    found = kinds(
        detector,
        {A: sample(), B: sample()},  # what is there first is no event
        {A: sample(), B: "closed the connection"},
        {A: sample(), B: "is not there"},
        {A: sample(), B: sample(started=200.0)},
        {A: sample(started=300.0), B: sample(started=200.0)},  # died between two looks
    )
    assert found == ["died", "returned", "returned"]


def test_servers_end_when_all_trainers_left() -> None:
    left = sample(trainer_left=1.0)
    assert kinds(EventDetector(), {A: sample()}, {A: left}, {A: "gone"}) == ["left", "ended"]


def test_trainers_come_go_silent_and_return() -> None:
    looks: list[dict[str, Sample | str]] = [
        {A: Sample(1.0, {"server_step": 0.0, "server_start_time_seconds": 100.0})},
        {A: sample()},
        {A: sample(trainer_silent_seconds=4.0)},
        {A: sample(trainer_silent_seconds=20.0, trainer_lost=1.0)},
        {A: sample(trainer_joins_total=2.0)},
        {A: sample(trainer_joins_total=2.0, trainer_silent_seconds=3.5)},
        {A: sample(trainer_joins_total=2.0)},
    ]
    wanted = ["joined", "silent", "lost", "returned", "silent", "heard"]
    assert kinds(EventDetector(), *looks) == wanted


def test_a_restarted_server_makes_no_trainer_return() -> None:
    first: dict[str, Sample | str] = {A: sample(trainer_joins_total=3.0), B: sample()}
    assert kinds(EventDetector(), first, {A: sample(started=9.0), B: sample()}) == ["returned"]


def test_saves_checkpoints_and_values_that_are_not_finite() -> None:
    def look(saves: int, own: float, loss: float) -> dict[str, Sample | str]:
        found = {}
        for at in (A, B):
            found[at] = sample(trainer_scalar_step=7.0)
            found[at].values.update(saves_total=saves, checkpoint_step=own)
            found[at].scalars[0] = {"loss": loss}
        return dict(found)

    detector = EventDetector()
    assert detector.look(1.0, look(0, 3.0, 0.5)) == []
    assert detector.look(2.0, look(1, 3.0, math.nan)) == [
        Event(2.0, "saved", "servers 0, 1 wrote parts of a checkpoint"),
        Event(2.0, "nonfinite", "trainer 0: loss is nan at step 7"),
    ]
    found = kinds(detector, look(1, 9.0, math.nan), look(1, 9.0, 0.5))
    assert found == ["checkpoint", "checkpoint", "finite"]


def test_a_page_gets_each_sample_and_event_once() -> None:
    looks: Iterator[Sample | OSError] = iter(
        [sample(1), sample(4), OSError(111, "gone"), sample(9, started=7.0)]
    )

    def look_at(_: str) -> Sample:
        found = next(looks)
        if isinstance(found, OSError):
            raise found
        return found

    watch = Watch(Board([A], look_at=look_at), now=lambda: 5.0)
    row = event = 0
    events, rows = [], 0
    for _ in range(4):
        watch.look()
        data, row, event = watch.updates(row, event)
        events += [one[1] for one in data["events"]]
        rows += len(data["rows"])
    assert rows == row == 4
    assert events == ["gone", "returned"]
    assert watch.updates(row, event)[0]["events"] == []
    (_, _, said), _ = watch.updates(0, 0)[0]["events"]
    assert said.startswith("no server answers any more, after step 4")


def test_hostile_names_are_cut_and_bounded() -> None:
    found = sample()
    found.tables.update({f"table {n}": {"table_rows": 1.0} for n in range(10_000)})
    found.tables["x" * 500 + "\n\ud800"] = {"table_rows": 1.0, "table_bytes_held": 9.0}
    found.doing[0] = "two\nlines"
    watch = Watch(Board([A], look_at=lambda _: found))
    watch.look()
    data, *_ = watch.updates(0, 0)
    assert len(data["tables"]) == MOST_LISTED
    assert data["counts"]["tables"] == 10_001
    assert data["tables"][0][0] == "x" * 197 + "..."
    assert data["trainers"][0]["doing"] == "two?lines"


def test_events_are_bounded() -> None:
    steps = iter(range(10**9))
    watch = Watch(Board([A], look_at=lambda _: sample(started=float(next(steps)))))
    for _ in range(20):
        watch.look()
    watch.events.extend(watch.events[0] for _ in range(2 * MOST_EVENTS))
    assert len(watch.events) == MOST_EVENTS
