"""Plot of a timeline: what each process did, as bars by kind."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxfleet.errors import ProgramError
from jaxfleet.observability.plots import COLORS, bars, drawing, legend

_NARROWEST = 1 / 2000  # of the time that is shown: narrower bars and gaps are not seen
_ROW, _THINNER = 0.8, 0.24  # height of a row's outer bars, and how much inner ones are less
_DEEPEST = 2
_OTHER = "other"


@dataclass(frozen=True)
class Bar:
    """One span.

    Attributes:
        lane: its process's and thread's numbers.
        kind: what it is, such as `send`, without what it is of.
        depth: the number of spans around it in its thread.
        begin: seconds since the job began.
        length: seconds.
    """

    lane: tuple[int, int]
    kind: str
    depth: int
    begin: float
    length: float


def plot_timeline(
    timeline: dict[str, Any],
    path: str | Path,
    *,
    first_s: float = 0.0,
    last_s: float | None = None,
) -> None:
    """Draws a merged timeline: a row for each thread of each process, a color for each kind.

    Inner spans, such as a wait within a step, are narrower than those around them.

    Args:
        timeline: what `merge` returns.
        path: a file; its suffix selects the format: `.png`, `.svg`.
        first_s: where to begin, in seconds since the job did.
        last_s: where to end; by default when the job does.

    Raises:
        ProgramError: no span is in this time.
        StrategyError: matplotlib is not installed, or does not write this format.
    """
    found = _bars(timeline["traceEvents"])
    end = max((bar.begin + bar.length for bar in found), default=0.0)
    last = end if last_s is None else min(last_s, end)
    found = [bar for bar in found if bar.begin < last and bar.begin + bar.length > first_s]
    if not found:
        what = f"no span is between {first_s:g} s and {last:g} s of the timeline"
        raise ProgramError(what, hint=f"it has spans until {end:.3g} s")
    kinds = _kinds(found)
    lanes = sorted({bar.lane for bar in found})
    names = _lane_names(timeline["traceEvents"], lanes)
    height = min(40.0, 1.6 + 0.42 * len(lanes) + 0.25 * (1 + len(kinds) // 4))
    with drawing(path, "timeline of the job", height=height) as axes:
        for (lane, kind, depth), spans in _rows(found, (last - first_s) * _NARROWEST).items():
            thickness = _ROW - _THINNER * depth
            bottom = len(lanes) - 1 - lanes.index(lane) - thickness / 2
            number = kinds.index(kind if kind in kinds else _OTHER)
            bars(axes, spans, (bottom, thickness), number)
        axes.set_xlim(first_s, last)
        axes.set_ylim(-0.6, len(lanes) - 0.4)
        axes.set_yticks(range(len(lanes)), reversed(names))
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("seconds since the job's first span")
        legend(axes, kinds)


def _bars(events: Iterable[dict[str, Any]]) -> list[Bar]:
    lanes: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append(event)
    return [bar for lane, spans in lanes.items() for bar in _nested(lane, spans)]


def _nested(lane: tuple[int, int], spans: Sequence[dict[str, Any]]) -> Iterable[Bar]:
    """Yields a thread's spans with their depths: they are ended in reverse."""
    open_until: list[float] = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        begin, end = span["ts"] / 1e6, (span["ts"] + span["dur"]) / 1e6
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        depth = min(len(open_until), _DEEPEST)
        yield Bar(lane, _kind(span["name"]), depth, begin, end - begin)
        open_until.append(end)


def _kind(name: str) -> str:
    """Returns the first word of a span's name: the rest says of what."""
    return name.split(maxsplit=1)[0] if name.split() else _OTHER


def _kinds(found: Iterable[Bar]) -> list[str]:
    """Returns the kinds that have a colour of their own, those with the most time first."""
    seconds: dict[str, float] = defaultdict(float)
    for bar in found:
        seconds[bar.kind] += bar.length
    kinds = sorted(seconds, key=lambda kind: -seconds[kind])
    return kinds if len(kinds) <= len(COLORS) else [*kinds[: len(COLORS) - 1], _OTHER]


def _lane_names(events: Iterable[dict[str, Any]], lanes: Sequence[tuple[int, int]]) -> list[str]:
    processes, threads = dict[int, str](), dict[tuple[int, int], str]()
    for event in events:
        if event["ph"] == "M" and event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        if event["ph"] == "M" and event["name"] == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    several = {pid for pid, count in Counter(pid for pid, _ in lanes).items() if count > 1}
    return [
        f"{processes[pid]}, {threads[pid, tid]}" if pid in several else processes[pid]
        for pid, tid in lanes
    ]


def _rows(
    found: Iterable[Bar], narrowest: float
) -> dict[tuple[tuple[int, int], str, int], list[tuple[float, float]]]:
    """Returns (begin, length) by lane, kind and depth, outer spans first; joins close ones."""
    rows: dict[tuple[tuple[int, int], str, int], list[tuple[float, float]]] = defaultdict(list)
    for bar in sorted(found, key=lambda bar: (bar.depth, bar.begin)):
        row, length = rows[bar.lane, bar.kind, bar.depth], max(bar.length, narrowest)
        if row and bar.begin - sum(row[-1]) < narrowest and length <= 2 * narrowest:
            row[-1] = row[-1][0], max(sum(row[-1]), bar.begin + length) - row[-1][0]
        else:
            row.append((bar.begin, length))
    return rows
