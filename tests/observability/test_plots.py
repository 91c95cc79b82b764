"""Plots have one look, readable without colour, and need nothing but the extra `plot`."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxfleet.cli import main
from jaxfleet.errors import ProgramError, StrategyError
from jaxfleet.observability import FileSpans, merge
from jaxfleet.observability.plots import COLORS, DASHES, HATCHES, curve, drawing, limit
from jaxfleet.observability.timeline_plot import plot_timeline


def texts(path: Path) -> list[str]:
    """Returns the texts of an SVG, which keeps them as text."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def lines(path: Path) -> None:
    with drawing(path, "a $title$ of <name>") as axes:
        curve(axes, [0, 1], [1, 2], "as it is", 0)
        curve(axes, [0, 1], [2, 1], "as run", 1)
        limit(axes, 1.5, "budget")
        axes.legend()


def test_equal_plots_are_equal_files_with_their_text(tmp_path: Path) -> None:
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    lines(one)
    lines(two)
    assert one.read_text() == two.read_text()
    assert {"a $title$ of &lt;name&gt;", "as it is", "as run", "budget"} <= set(texts(one))


def test_lines_and_bars_differ_without_colour(tmp_path: Path) -> None:
    lines(tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text()
    assert len(set(re.findall(r"stroke-dasharray: ([^;]*)", drawn))) >= 2  # and one is solid
    assert len(set(HATCHES)) == len(HATCHES) == len(set(COLORS)) == len(COLORS)
    assert len(set(DASHES)) == len(DASHES)


def test_the_ground_is_white_on_dark_pages_too(tmp_path: Path) -> None:
    lines(tmp_path / "a.svg")
    assert 'style="fill: #ffffff"' in (tmp_path / "a.svg").read_text()


def test_an_unknown_format_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match="not a format of a picture"):
        lines(tmp_path / "a.picture")
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(StrategyError, match="matplotlib is not installed") as caught:
        lines(tmp_path / "a.svg")
    assert caught.value.hint == 'pip install "jaxfleet[plot]"'


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    folder = tmp_path / "trace"
    for name in ("trainer 0", "trainer <1>", "server 0"):
        spans = FileSpans(folder, name)
        with spans.span("step", step=1):
            with spans.span("compute"):
                pass
            with spans.span("wait for barrier"):
                pass
        spans.close()
    return folder


def test_a_timeline_is_drawn_with_a_row_for_each_process(tmp_path: Path, trace: Path) -> None:
    picture = tmp_path / "timeline.svg"
    assert main(["timeline", str(trace), "--plot", str(picture)]) == 0
    found = texts(picture)
    rows = ["server 0", "trainer 0", "trainer &lt;1&gt;"]
    assert [text for text in found if text in rows] == rows[::-1]  # from below
    assert {"step", "compute", "wait"} <= set(found)


def test_a_picture_and_a_trace_may_be_written_together(tmp_path: Path, trace: Path) -> None:
    picture, merged = tmp_path / "timeline.png", tmp_path / "timeline.json"
    assert main(["timeline", str(trace), "--plot", str(picture), "-o", str(merged)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert merged.read_text().startswith("{")


def test_a_time_without_spans_is_refused(tmp_path: Path, trace: Path) -> None:
    with pytest.raises(ProgramError, match="no span is between 1000 s and"):
        plot_timeline(merge(trace), tmp_path / "a.svg", first_s=1000.0)
    assert not (tmp_path / "a.svg").exists()


def event(begin: float, length: float, name: str = "send", tid: int = 0) -> dict[str, Any]:
    return {"ph": "X", "pid": 0, "tid": tid, "name": name, "ts": begin, "dur": length}


def named(what: str, name: str, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": tid, "name": what, "args": {"name": name}}


@pytest.mark.grid
def test_many_short_spans_make_a_small_file(tmp_path: Path) -> None:
    short = [event(10 * n, 5) for n in range(50_000)]
    events = [named("process_name", "trainer 0"), named("thread_name", "main"), *short]
    plot_timeline({"traceEvents": events}, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size < 1_000_000


def test_threads_have_rows_and_rare_kinds_one_colour(tmp_path: Path) -> None:
    many = [event(10 * n, 9 - n / 10, f"kind{n} of work") for n in range(12)]
    events = [
        *(named("process_name", "trainer 0"), named("thread_name", "main")),
        *(named("thread_name", "sender", 1), event(0, 50, "send", 1), *many),
    ]
    plot_timeline({"traceEvents": events}, tmp_path / "a.svg")
    found = texts(tmp_path / "a.svg")
    assert {"trainer 0, main", "trainer 0, sender", "send", "kind0", "other"} <= set(found)
    assert "kind11" not in found
