"""The history is bounded, and pages get only what is new."""

import math
from collections.abc import Iterator

import pytest

from jaxfleet.board import Event, EventDetector, History, Series, Watch
from jaxfleet.board.watch import LEAST_EVERY_S, MOST_EVENTS, MOST_LISTED, Has
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
    looks: list[dict[str, Sample | str]] = [{A: sample()}, {A: left}, {A: "gone"}]
    assert kinds(EventDetector(), *looks) == ["left", "ended", "ended"]  # the server, and the job


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
        Event(2.0, "saved", "servers 0, 1 wrote parts of a checkpoint, after step 5"),
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
    has, events, rows, names = Has(), [], 0, []
    for _ in range(4):
        watch.look()
        data, has = watch.updates(has)
        events += [one[1] for one in data["events"]]
        rows += len(data["rows"])
        names += data["series"]
    assert rows == has.rows == 4
    assert len({tuple(name) for name in names}) == len(names) == has.series  # each name once
    assert events == ["died", "died", "returned"]
    assert watch.updates(has)[0]["events"] == []
    (_, _, first), (_, _, said), _ = watch.updates(Has())[0]["events"]
    assert (first, said) == (
        "server 0 is not there: nothing listens at its port, after step 4",
        "no server is left, after step 4, and the job had not ended",
    )


def ending(*, failed: bool = False, of_rank: int | None = None) -> Sample:
    """Returns the metrics of a process that is about to end."""
    found = sample() if of_rank is None else rank_sample(of_rank)
    found.values.update(ended=1.0, failed=float(failed))
    return found


def rank_sample(rank: int, step: int = 5, *, at_s: float = 1.0, own_s: float = 0.0) -> Sample:
    values = {"rank_step": float(step), "rank_start_time_seconds": 100.0, "saves_total": 0.0}
    values |= {"rank_run_seconds_total": at_s / 2, "ended": 0.0}
    mine = {"trainer_step": float(step), "trainer_own_seconds_total": own_s, "trainer_left": 0.0}
    mine["trainer_resident_bytes"] = 5e6
    return Sample(at_s, values, {rank: mine})


def test_the_end_of_a_job_differs_from_the_death_of_all_servers() -> None:
    at: dict[str, Sample | str] = {A: sample(), B: sample()}
    down: dict[str, Sample | str] = {A: "is not there", B: "is not there"}
    ends = [EventDetector() for _ in range(4)]
    for detector in ends:
        detector.look(10.0, at)
    assert ends[0].look(11.0, {A: ending(), B: ending()})[-1].text == (
        "the job has ended, after step 5"
    )
    assert ends[0].look(12.0, down) == []  # it is said already
    assert ends[1].look(11.0, down)[-1] == Event(
        11.0, "died", "no server is left, after step 5, and the job had not ended"
    )
    assert ends[2].look(11.0, {A: ending(failed=True), B: "is not there"})[-1].kind == "failed"
    assert ends[3].look(60.0, down)[-1].kind == "gone"  # a look in a minute misses the goodbye


def test_a_server_that_is_slow_to_answer_has_not_died() -> None:
    looks: list[dict[str, Sample | str]] = [
        {A: sample(), B: sample()},
        {A: sample(), B: "does not answer in time"},
        {A: sample(), B: sample()},
    ]
    assert kinds(EventDetector(), *looks) == ["silent", "returned"]


def test_a_trainer_whose_connection_ends_without_a_bye_has_died() -> None:
    looks: list[dict[str, Sample | str]] = [
        {A: sample(trainer_connected=1.0), B: sample(trainer_connected=1.0)},
        {A: sample(trainer_connected=0.0), B: sample(trainer_connected=1.0)},
        {A: sample(trainer_connected=0.0), B: sample(trainer_connected=0.0)},
        {A: sample(trainer_connected=1.0), B: sample(trainer_connected=1.0)},  # it was the network
        {A: sample(trainer_connected=0.0, trainer_left=1.0), B: sample()},
    ]
    assert kinds(EventDetector(), *looks) == ["died", "heard", "left"]


def test_ranks_are_shown_by_their_own_metrics() -> None:
    looks = [rank_sample(0), rank_sample(1)]
    looks += [rank_sample(rank, 25, at_s=3.0, own_s=0.2 + 0.8 * rank) for rank in (0, 1)]
    of = {A: iter(looks[::2]), B: iter(looks[1::2])}  # they are asked at the same time
    watch = Watch(Board([A, B], look_at=lambda address: next(of[address])))
    watch.look()
    watch.look()
    data, _ = watch.updates(Has())
    assert data["kind"] == "rank"
    lines = {(group, label): at for at, (group, _, label) in enumerate(data["series"], start=1)}
    last = data["rows"][-1]
    shown = {key: last[at] for key, at in lines.items()}
    wanted = {"steps": 10.0, "step_time": 0.1, "joint": 0.5, "memory": 5e6, "late": 0.4}
    assert {group: shown[group, "rank 1"] for group in wanted} == pytest.approx(wanted)
    assert shown["late", "rank 0"] == 0.0
    assert [(one["number"], one["step"], one["saves"]) for one in data["servers"]] == [
        (0, 25, 0),
        (1, 25, 0),
    ]


def test_events_of_ranks_name_them() -> None:
    saved = rank_sample(0, 9)
    saved.values["saves_total"] = 1.0
    looks: list[dict[str, Sample | str]] = [
        {A: rank_sample(0), B: rank_sample(1)},
        {A: saved, B: rank_sample(1)},
        {A: saved, B: "closed the connection"},
        {A: ending(of_rank=0, failed=True), B: "is not there"},
    ]
    detector = EventDetector()
    texts = [one.text for at, look in enumerate(looks) for one in detector.look(float(at), look)]
    assert texts == [
        "rank 0 wrote a checkpoint, at step 9",
        "rank 1 closed the connection, after step 5",
        "rank 0 ended with an error, after step 5",
        "the job has failed: no rank is left, after step 5",
    ]


def test_hostile_names_are_cut_and_bounded() -> None:
    found = sample()
    found.tables.update({f"table {n}": {"table_rows": 1.0} for n in range(10_000)})
    found.tables["x" * 500 + "\n\ud800"] = {"table_rows": 1.0, "table_bytes_held": 9.0}
    found.doing[0] = "two\nlines"
    watch = Watch(Board([A], look_at=lambda _: found))
    watch.look()
    data, _ = watch.updates(Has())
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
