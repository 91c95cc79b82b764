"""Watch of a job: looks at its servers or ranks, and keeps what the page shows."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxfleet.board.events import Event, EventDetector
from jaxfleet.board.history import History, Series
from jaxfleet.observability import Board, Sample, printable
from jaxfleet.observability.top_view import Looked, Seen

KEPT_S = 3600.0  # of history
LEAST_EVERY_S = 0.5  # more samples of an hour would take more memory than is promised
MOST_EVENTS = 1000
MOST_LISTED = 200  # servers, trainers, tables and scalars in the page's tables
_ROWS_AT_A_TIME = 300
_LONGEST = 200  # characters of a name

_RATES = {
    "steps": "server_step",
    "received": "received_bytes_total",
    "sent": "sent_bytes_total",
    "busy": "block_seconds_total",
}


@dataclass(frozen=True)
class Has:
    """What a page has: the numbers of samples, events and series, of all so far."""

    rows: int = 0
    events: int = 0
    series: int = 0


class Watch:
    """Looks at the servers of a job, and keeps the last hour of figures and events; thread-safe.

    Args:
        board: the servers.
        every_s: seconds between two looks.
        now: the time, as a Unix time.

    Attributes:
        history: the figures.
        events: the newest events, oldest first.
        event_count: number of all events so far.
    """

    def __init__(
        self, board: Board, every_s: float = 1.0, *, now: Callable[[], float] = time.time
    ) -> None:
        samples = int(KEPT_S / max(every_s, LEAST_EVERY_S)) + 1
        self.history = History(samples)
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self.event_count = 0
        self._board, self._now, self._every_s = board, now, every_s
        self._detector = EventDetector()
        self._tables: dict[str, Any] = {}
        self._lock = threading.Lock()  # pages are served while the servers are looked at

    @property
    def addresses(self) -> list[str]:
        return list(self._board.addresses)

    def look(self) -> None:
        """Looks at every server once."""
        self._board.look()
        found, seen, at_s = self._board.found, self._board.trainers(), self._now()
        results = {at: one.now if one.now is not None else one.error for at, one in found.items()}
        figures, tables = dict(_figures(self._board, seen)), _tables(self._board, seen)
        events = self._detector.look(at_s, results)
        with self._lock:
            self.history.add(at_s, figures)
            self.events += events
            self.event_count += len(events)
            self._tables = tables

    def updates(self, has: Has) -> tuple[dict[str, Any], Has]:
        """Returns what is new since a page's last update, in parts of bounded size.

        Returns:
            Plain data for JSON, and what the page has then.
        """
        with self._lock:
            return self._updates(has)

    def _updates(self, has: Has) -> tuple[dict[str, Any], Has]:
        history = self.history
        begin = max(has.rows, history.first)
        rows = list(history.rows(begin, _ROWS_AT_A_TIME))
        kept_from = self.event_count - len(self.events)
        fresh = list(self.events)[max(has.events - kept_from, 0) :]
        names = [[one.group, one.chart, one.label] for one in history.series[has.series :]]
        data = {
            "every_s": self._every_s,
            "kept_s": KEPT_S,
            "series": names,
            "left_out": history.left_out,
            "rows": rows,
            "events": [[round(one.at_s, 3), one.kind, _shown(one.text)] for one in fresh],
            "more": begin + len(rows) < history.count,
            **self._tables,
        }
        return data, Has(begin + len(rows), self.event_count, len(history.series))


def _figures(board: Board, seen: Iterable[Seen]) -> Iterator[tuple[Series, float]]:
    for number, address in enumerate(board.addresses):
        one = board.found[address]
        if one.now is not None and one.now.rank is None:
            yield from _of_server(one, one.now, f"server {number}")
        elif one.now is not None:
            yield from _of_rank(one, f"rank {one.now.rank}")
    scalars = _scalars(board)
    for trainer in seen:
        label = f"{board.kind} {trainer.number}"
        if trainer.has_left:
            continue
        yield Series.of("late", label), min(1.0, trainer.late)
        if board.kind == "trainer":  # ranks take steps together
            yield Series.of("behind", label), float(trainer.behind)
        if resident := _memory(board, trainer.number):
            yield Series.of("memory", label), resident
        for name, (_, value) in scalars.get(trainer.number, {}).items():
            yield Series.of("scalar", label, _shown(name)), value


def _of_server(one: Looked, now: Sample, label: str) -> Iterator[tuple[Series, float]]:
    if one.before is not None and one.before is not now:
        for group, metric in _RATES.items():
            yield Series.of(group, label), one.rate(metric)
    yield Series.of("queued", label), now.values.get("queued_bytes", 0.0)
    if now.tables:
        yield Series.of("rows", label), _sum(one, "table_rows")
        yield Series.of("table_bytes", label), _sum(one, "table_bytes_held")
    if resident := now.values.get("resident_bytes"):
        yield Series.of("memory", label), resident


def _of_rank(one: Looked, label: str) -> Iterator[tuple[Series, float]]:
    if one.before is None or one.before is one.now:
        return
    yield Series.of("steps", label), one.rate("rank_step")
    yield Series.of("joint", label), one.rate("rank_run_seconds_total")
    if one.step_s is not None:
        yield Series.of("step_time", label), one.step_s


def _sum(one: Looked, metric: str) -> float:
    tables = one.now.tables.values() if one.now is not None else ()
    return sum(values.get(metric, 0.0) for values in tables)


def _memory(board: Board, trainer: int) -> float:
    """Returns a trainer's resident memory, 0 if unknown."""
    of = [one.now.of_trainers.get(trainer, {}) for one in board.answers if one.now is not None]
    return max((values.get("trainer_resident_bytes", 0.0) for values in of), default=0.0)


def _scalars(board: Board) -> Mapping[int, Mapping[str, tuple[int, float]]]:
    """Returns the newest scalars of each trainer, with their step."""
    found: dict[int, dict[str, tuple[int, float]]] = {}
    for one in board.answers:
        assert one.now is not None
        for trainer, values in one.now.scalars.items():
            of_trainer = one.now.of_trainers.get(trainer, {})
            step = int(of_trainer.get("trainer_scalar_step", 0.0))
            known = found.setdefault(trainer, {})
            for name, value in values.items():
                if name not in known or known[name][0] < step:
                    known[name] = step, value
    return found


def _tables(board: Board, seen: list[Seen]) -> dict[str, Any]:
    """Returns the rows of the page's tables, as text and numbers."""
    servers = [_server_row(board, number) for number in range(len(board.addresses))]
    trainers: list[Any] = [
        {
            "number": one.number,
            "step": one.step,
            "behind": one.behind,
            "late": min(1.0, one.late),
            "silent_s": round(one.silent_s, 1),
            "left": one.has_left,
            "doing": _shown(one.doing),
            "memory": _memory(board, one.number),
        }
        for one in seen
    ]
    tables = _row_tables(board)
    scalars = [
        [f"{board.kind} {trainer}", _shown(name), step, f"{value:.6g}"]
        for trainer, values in sorted(_scalars(board).items())
        for name, (step, value) in values.items()
    ]
    listed: dict[str, list[Any]] = {
        "servers": servers,
        "trainers": trainers,
        "tables": tables,
        "scalars": scalars,
    }
    return {
        "kind": board.kind,
        **{name: rows[:MOST_LISTED] for name, rows in listed.items()},
        "counts": {name: len(rows) for name, rows in listed.items()},
    }


def _server_row(board: Board, number: int) -> dict[str, Any]:
    address = board.addresses[number]
    one = board.found[address]
    row = {"number": number, "address": _shown(address), "error": _shown(one.error)}
    if one.now is None:
        return row
    values = one.now.values
    if one.now.rank is not None:
        return {
            **row,
            "number": one.now.rank,
            "step": int(values["rank_step"]),
            "steps": round(one.rate("rank_step"), 6),
            "joint": round(one.rate("rank_run_seconds_total"), 6),
            "step_time": one.step_s,
            "memory": values.get("resident_bytes", 0.0),
            "saves": int(values.get("saves_total", 0)),
        }
    rates = {group: round(one.rate(metric), 6) for group, metric in _RATES.items()}
    return {
        **row,
        **rates,
        "step": int(values.get("server_step", -1)),
        "queued": values.get("queued_bytes", 0.0),
        "rows": _sum(one, "table_rows"),
        "memory": values.get("resident_bytes", 0.0),
        "checkpoint": values.get("checkpoint_step"),
    }


def _row_tables(board: Board) -> list[list[Any]]:
    """Returns name, rows and bytes of each table over all servers, the largest first."""
    sums: dict[str, list[float]] = {}
    for one in board.answers:
        assert one.now is not None
        for name, values in one.now.tables.items():
            total = sums.setdefault(name, [0.0, 0.0])
            total[0] += values.get("table_rows", 0.0)
            total[1] += values.get("table_bytes_held", 0.0)
    ordered = sorted(sums.items(), key=lambda item: (-item[1][1], -item[1][0], item[0]))
    return [[_shown(name), *totals] for name, totals in ordered]


def _shown(text: str) -> str:
    return printable(text, _LONGEST)
