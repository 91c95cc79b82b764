"""Display of metrics: rates, the slowest trainer, servers that do not answer."""

import io
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console

from jaxfleet.errors import ConnectError
from jaxfleet.observability import Board, Sample, scrape
from jaxfleet.observability.trainer_metrics import TrainerMetrics
from jaxfleet.ps.server.metrics import MetricsExporter, ServerMetrics
from jaxfleet.transport.messages import Plain

A, B = "one:1", "two:2"


def sample(at_s: float, step: int, late_s: float, *, bytes_in: float = 0.0) -> Sample:
    """Returns a server's metrics at a time; trainer 1 is one step behind trainer 0."""
    common = {"trainer_silent_seconds": 0.5, "trainer_left": 0.0}
    return Sample(
        at_s,
        {"server_step": step, "received_bytes_total": bytes_in},
        {
            0: {"trainer_step": step + 1, "trainer_late_seconds_total": 0.0, **common},
            1: {"trainer_step": step, "trainer_late_seconds_total": late_s, **common},
        },
        doing={0: "step 3", 1: "computes"},
    )


def text(board: Board) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(board.tables())
    return out.getvalue()


def test_rates_are_what_grew_between_two_looks() -> None:
    looks = iter([sample(10.0, 4, 0.0), sample(12.0, 10, 1.0, bytes_in=3e6)])
    board = Board([A], look_at=lambda _: next(looks))
    board.look()
    assert board.found[A].rate("server_step") == 0.0
    board.look()
    assert board.found[A].rate("server_step") == 3.0
    assert board.found[A].rate("received_bytes_total") == 1.5e6
    first, second = board.trainers()
    assert (first.step, first.behind, first.late) == (11, 0, 0.0)
    assert (second.step, second.behind, second.late, second.doing) == (10, 1, 0.5, "computes")
    shown = text(board)
    assert "1 slowest" in shown
    assert "0 slowest" not in shown


def test_saves_and_starts_are_counted() -> None:
    found = sample(10.0, 4, 0.0)
    found.values.update(saves_total=17.0, job_restarts=2.0)
    found.of_trainers[1]["trainer_joins_total"] = 3.0
    board = Board([A], look_at=lambda _: found)
    board.look()
    assert [one.starts for one in board.trainers()] == [1, 3]
    shown = text(board)
    assert "the whole job was started again 2 times" in shown
    (server,) = (line.split() for line in shown.splitlines() if line.startswith(f"0 {A}"))
    assert server[-1] == "17"
    found.values["job_restarts"] = 0.0
    assert "started again" not in text(board)


def test_a_trainer_that_is_silent_and_a_server_without_a_state_are_marked() -> None:
    found = sample(10.0, -1, 0.0)
    found.of_trainers[1]["trainer_silent_seconds"] = 3.1
    board = Board([A], look_at=lambda _: found)
    board.look()
    (server,) = (line.split() for line in text(board).splitlines() if line.startswith(f"0 {A}"))
    assert server[2] == "-"
    assert "1 silent" in text(board)
    assert "keep pace" not in text(board)
    found.of_trainers[1]["trainer_left"] = 1.0
    assert "silent" not in text(board)


def test_in_lockstep_who_comes_last_by_a_little_is_not_called_slowest() -> None:
    looks = iter([sample(10.0, 4, 0.0), sample(12.0, 10, 0.1)])  # a step behind, 5 % late
    board = Board([A], look_at=lambda _: next(looks))
    board.look()
    board.look()
    assert "slowest" not in text(board)
    assert "trainers keep pace: the others wait for none more than 5%" in text(board)


@pytest.mark.parametrize(("own", "is_slowest"), [((0.9, 0.95), False), ((0.2, 0.95), True)])
def test_in_lockstep_only_who_takes_longer_for_a_step_is_slowest(
    own: tuple[float, float], is_slowest: bool
) -> None:
    looks = []
    for at_s, step, late_s in ((10.0, 4, 0.0), (12.0, 10, 1.5)):  # always 75 % late
        found = sample(at_s, step, late_s)
        for number, share in enumerate(own):
            found.of_trainers[number]["trainer_own_seconds_total"] = share * at_s
        looks.append(found)
    board = Board([A], look_at=lambda _: looks.pop(0))
    board.look()
    board.look()
    assert ("1 slowest" in text(board)) == is_slowest
    said = "trainers keep pace: none is behind, or takes longer for a step than the others"
    assert (said in text(board)) != is_slowest


def test_a_server_that_started_again_counts_anew() -> None:
    looks = iter([sample(1.0, 90, 9.0), sample(2.0, 3, 0.0)])
    board = Board([A], look_at=lambda _: next(looks))
    board.look()
    board.look()
    assert board.found[A].rate("server_step") == 0.0
    assert board.trainers()[1].late == 0.0


def test_a_server_that_does_not_answer_says_why_and_the_others_are_shown() -> None:
    def look_at(address: str) -> Sample:
        if address == B:
            raise OSError("connection refused")
        return sample(1.0, 5, 0.0)

    board = Board([A, B], look_at=look_at)
    board.look()
    assert "connection refused" in text(board)
    assert [seen.number for seen in board.trainers()] == [0, 1]


@pytest.fixture
def served() -> Iterator[tuple[MetricsExporter, str]]:
    metrics = MetricsExporter()
    port = metrics.start("127.0.0.1", 0)
    yield metrics, f"127.0.0.1:{port}"
    metrics.close()


def test_metrics_come_back_as_they_were_given(
    served: tuple[MetricsExporter, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # a proxy that cannot reach the job
    monkeypatch.delenv("no_proxy", raising=False)
    metrics, address = served
    with pytest.raises(ConnectError, match="is not a server or rank of jaxfleet's"):
        scrape(address)  # there are no metrics yet
    said = 'says "no"\\, and\nmore'
    trainers = (TrainerMetrics(0, 7, 0.1, 0.25, said, has_left=False),)
    counted: dict[str, Plain] = {
        "step": 6,
        "block_s": 1.5,
        "tables": {"t": {"rows": 12, "bytes_held": 80.0}},
    }
    metrics.publish(ServerMetrics("server 0", counted, {"push": 3}, 400, 800, trainers))
    found = scrape(address)
    assert found.values["server_step"] == 6
    assert found.values["block_seconds_total"] == 1.5
    assert found.values["received_bytes_total"] == 400
    assert found.values["sent_bytes_total"] == 800
    assert found.of_trainers[0]["trainer_step"] == 7
    assert found.of_trainers[0]["trainer_late_seconds_total"] == 0.25
    assert found.tables["t"] == {"table_rows": 12, "table_bytes_held": 80.0}
    assert found.doing == {0: said}


@pytest.mark.parametrize("doing", ["\x1b]0;title\x07", "[/red]", "[red]"])
def test_a_terminal_does_not_obey_what_a_trainer_reports(doing: str) -> None:
    board = Board([A], look_at=lambda _: replace(sample(10.0, 4, 0.0), doing={0: doing}))
    board.look()
    assert doing.replace("\x1b", "?").replace("\x07", "?") in text(board)
