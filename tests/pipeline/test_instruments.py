"""Instruments that record a run."""

import pytest

from jaxfleet.ir import parse
from jaxfleet.pipeline import Record, Statistics, Timing, parse_pipeline, run_pipeline, table
from tests.pipeline.toys import TOY

pytestmark = pytest.mark.usefixtures("toy_passes")


def test_a_table_lines_up_its_columns() -> None:
    rows = [("pass", "ms"), ("a_long_name", "1.00"), ("b", "12.00")]
    expected = "pass            ms\na_long_name   1.00\nb            12.00"
    assert table(rows, right=(1,)) == expected


def test_timing_shows_each_pass_and_the_total() -> None:
    timing = Timing()
    run_pipeline(TOY, parse_pipeline("nothing,add_copies"), instruments=[timing])
    lines = str(timing).splitlines()
    assert [line.split()[0] for line in lines] == [
        "pass",
        "input",
        "nothing",
        "add_copies",
        "total",
    ]
    assert timing.total[0] == sum(seconds for _, seconds, _ in timing.rows)


def test_statistics_count_operators_before_the_first_pass_and_after_the_last() -> None:
    statistics = Statistics()
    run_pipeline(TOY, parse_pipeline("add_copies{count=2},add_copies"), instruments=[statistics])
    assert [line.split() for line in str(statistics).splitlines()] == [
        ["operator", "before", "after", "change"],
        ["c_copy", "0", "3", "+3"],
        ["fetch", "1", "1"],
        ["jax.mul", "1", "1"],
        ["total", "2", "5", "+3"],
    ]


@pytest.fixture
def record() -> Record:
    kept = Record()
    run_pipeline(TOY, parse_pipeline("nothing,add_copies{count=2}"), instruments=[kept])
    return kept


def test_a_record_finds_a_stage_by_place_and_by_name(record: Record) -> None:
    assert record["add_copies"] is record[2]
    assert record["input"] is record[0]
    assert len(record[1:]) == 2
    with pytest.raises(KeyError, match="no pass 'dce' ran; these did: input, nothing, add_copies"):
        record["dce"]


def test_a_stage_can_be_read_whole_and_parsed_again(record: Record) -> None:
    stage = record["add_copies"]
    assert parse(stage.full_text) == stage.after
    assert "# model/train.py:7, in step; by add_copies" in stage.full_text


def test_a_folded_stage_shows_what_the_pass_made_with_its_line(record: Record) -> None:
    made = [line for line in record["add_copies"].text.splitlines() if "c_copy(h)" in line]
    assert len(made) == 2
    assert all(line.endswith("# model/train.py:7, in step; by add_copies") for line in made)


def test_a_diff_has_the_lines_that_the_pass_added(record: Record) -> None:
    lines = record["add_copies"].diff.splitlines()
    added = [line[1:].strip() for line in lines if line.startswith("+") and "c_copy" in line]
    assert added == ["copy2_0: f32[b,4] = c_copy(h)", "copy2_1: f32[b,4] = c_copy(h)"]
    assert record["nothing"].diff == ""


def test_a_diff_can_have_source_lines(record: Record) -> None:
    assert "by add_copies" not in record["add_copies"].diff
    assert "by add_copies" in record["add_copies"].diff_text(source=True)


def test_a_record_prints_as_its_index(record: Record) -> None:
    lines = str(record).splitlines()
    assert lines[0].split() == ["00_input", "2", "ops"]
    assert lines[1].split()[:5] == ["01_nothing", "unchanged", "2", "->", "2"]
    assert lines[2].split()[:6] == ["02_add_copies", "changed", "2", "->", "4", "ops"]
    assert lines[2].endswith("made 2 c_copy")
