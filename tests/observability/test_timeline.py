"""Spans of several processes become one timeline."""

import json
from pathlib import Path

import pytest

from jaxfleet.cli import main
from jaxfleet.errors import ProgramError
from jaxfleet.observability import NO_SPANS, FileSpans, merge


def events(timeline: dict[str, object], phase: str) -> list[dict[str, object]]:
    found = timeline["traceEvents"]
    assert isinstance(found, list)
    return [event for event in found if event["ph"] == phase]


def test_spans_of_all_processes_are_in_one_timeline(tmp_path: Path) -> None:
    one, two = FileSpans(tmp_path, "trainer 0"), FileSpans(tmp_path, "server 0")
    with one.span("step", step=1), two.span("block"), one.span("send"):
        pass
    one.close()
    two.close()
    out = tmp_path / "timeline.json"
    assert main(["timeline", str(tmp_path), "-o", str(out)]) == 0
    timeline = json.loads(out.read_text())
    spans = {str(event["name"]): event for event in events(timeline, "X")}
    assert spans.keys() == {"step", "send", "block"}
    assert spans["step"]["args"] == {"step": 1}
    assert spans["step"]["pid"] == spans["send"]["pid"] != spans["block"]["pid"]
    outer, inner = spans["step"], spans["send"]
    assert float(str(outer["ts"])) <= float(str(inner["ts"]))
    assert float(str(outer["dur"])) >= float(str(inner["dur"]))
    named = [e["args"] for e in events(timeline, "M") if e["name"] == "process_name"]
    assert named == [{"name": "server 0"}, {"name": "trainer 0"}]


def test_a_span_that_ends_in_an_error_is_noted(tmp_path: Path) -> None:
    spans = FileSpans(tmp_path, "trainer 0")
    with pytest.raises(ValueError, match="its own"), spans.span("step"):
        raise ValueError("its own")
    spans.close()
    with spans.span("after the end"):  # in a thread that still runs: ignored
        pass
    assert [event["name"] for event in events(merge(tmp_path), "X")] == ["step"]


def test_a_killed_process_left_half_a_line(tmp_path: Path) -> None:
    spans = FileSpans(tmp_path, "trainer 0")
    with spans.span("step"):
        pass
    (file,) = tmp_path.iterdir()
    with file.open("a") as also:  # nothing is buffered
        also.write('{"name": "st')
    assert [event["name"] for event in events(merge(tmp_path), "X")] == ["step"]


def test_a_full_disk_ends_the_notes_and_not_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spans = FileSpans(tmp_path, "trainer 0")
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr(spans, "_file", full)
        for _ in range(2):
            with spans.span("step"):
                pass
    assert capsys.readouterr().err.count("no more of the timeline is noted: ") == 1
    monkeypatch.undo()
    spans.close()


def test_what_is_no_timeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="no file of spans"):
        merge(tmp_path)
    for damaged in (
        b'{"process": "a"}\n[1]\n',
        b'{"process": "a"}\n{"took_us": 1}\n',
        b"",
        b"\xff\n",
    ):
        (tmp_path / "a.spans.jsonl").write_bytes(damaged)
        with pytest.raises(ProgramError, match=r"a\.spans\.jsonl"):
            merge(tmp_path)


def test_nothing_is_noted_where_nobody_asked() -> None:
    with NO_SPANS.span("step", step=1):
        pass
