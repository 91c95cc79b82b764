"""Dump folders, read back to what a report is built of."""

import json
from pathlib import Path

import pytest

from jaxfleet.errors import TextError
from jaxfleet.ir import Operands, Operator, Program, Source
from jaxfleet.pipeline import Dump, Record, parse_pipeline, run_pipeline, write_facts
from jaxfleet.report import build_report, of_record, read_folders
from jaxfleet.report.serialization import report_json
from tests.report.drawn import deep_history, deep_step, with_calls, write_dump


def test_a_dump_is_read_as_it_ran(tmp_path: Path) -> None:
    write_dump(tmp_path)
    (found,) = read_folders(tmp_path)
    record = Record()
    run_pipeline(
        deep_step(2), parse_pipeline("dce,grad_allreduce{devices=4}"), instruments=[record]
    )
    expected = of_record(record)
    assert [stage.name for stage in found.stages] == ["input", "dce", "grad_allreduce"]
    assert [stage.program for stage in found.stages] == [stage.program for stage in expected]
    assert found.stages[0].seconds < 0 <= found.stages[1].seconds


def test_a_dump_states_why_its_times_are_not_known(tmp_path: Path) -> None:
    write_dump(tmp_path)
    (found,) = read_folders(tmp_path)
    assert found.measured is None
    assert "written before its step runs" in found.why_unmeasured
    write_facts(tmp_path, {"measured": {"of": "another version"}})
    (found,) = read_folders(tmp_path)
    assert found.measured is None


def test_equal_dumps_are_read_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_dump(tmp_path / name)
    write_dump(tmp_path / "c", layers=1)
    assert [history.label for history in read_folders(tmp_path)] == ["a", "c"]


def test_what_a_step_decided_is_read(tmp_path: Path) -> None:
    write_dump(tmp_path)
    facts = {
        "decisions": ["step 'deep'", "  why"],
        "notes": ["captured for each batch size: because"],
        "facts": [["strategy.mode", "collective"]],
        "rows": 128,
        "fetched": ["metrics/loss"],
        "budget_bytes": None,
        "fitted_by": "",
        "passes": ["dce", "grad_allreduce{devices=4}"],
    }
    write_facts(tmp_path, facts)
    (found,) = read_folders(tmp_path)
    assert found.decisions == ("step 'deep'", "  why")
    assert found.notes == ("captured for each batch size: because",)
    assert found.stages[2].options == "grad_allreduce{devices=4}"
    program = json.loads(report_json(build_report([found])))["programs"][0]
    assert (program["sizes"], program["assumed"]) == ({"b": 32}, False)
    assert ["strategy.mode", "collective"] in program["facts"]


def test_a_dump_keeps_the_lines_that_operators_come_from(tmp_path: Path) -> None:
    file = tmp_path / "app" / "train.py"
    file.parent.mkdir()
    file.write_text("".join(f"line {n}\n" for n in range(1, 31)))
    op = Operator(
        "jax.neg", Operands.of("x"), Operands.of("y"), source=Source(str(file), 12, "step")
    )
    program = deep_step(1)
    block = program.root.with_ops([op])
    Dump(tmp_path / "dump")(next(iter(_stages(Program("p", {}, (block,))))))
    (found,) = read_folders(tmp_path / "dump")
    assert list(found.sources) == ["app/train.py"]
    lines = found.sources["app/train.py"]
    assert (min(lines), max(lines), lines[12]) == (7, 17, "line 12")


def _stages(program: Program) -> Record:
    from jaxfleet.pipeline import Stage  # noqa: PLC0415  # used here alone

    return Record([Stage(0, None, program, program)])


def test_a_text_names_files_that_are_not_looked_for(tmp_path: Path) -> None:
    write_dump(tmp_path)  # its operators come from app/model.py, a short path
    assert not (tmp_path / "sources.json").exists()


def test_a_folder_without_a_dump_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="contains no dump"):
        read_folders(tmp_path)


def test_a_dump_that_ends_with_an_invalid_program_is_reported(tmp_path: Path) -> None:
    write_dump(tmp_path)
    path = tmp_path / "full" / "02_grad_allreduce.txt"
    text = path.read_text()
    path.write_text(text.replace("jax.tanh(Dense_0.sum)", "jax.tanh(nowhere)"))
    program = json.loads(report_json(build_report(read_folders(tmp_path))))["programs"][0]
    (note,) = program["notes"]
    assert note.startswith("the program after grad_allreduce is not valid: ")
    assert "nowhere" in note
    assert deep_history(1).divided_at == 2


def test_a_dump_keeps_the_calls_that_lead_to_operators(tmp_path: Path) -> None:
    passes = parse_pipeline("dce,grad_allreduce{devices=4}")
    run_pipeline(with_calls(deep_step(2)), passes, instruments=[Dump(tmp_path)])
    (found,) = read_folders(tmp_path)
    program = json.loads(report_json(build_report([found])))["programs"][0]
    files = [path for path, _ in program["files"]]
    frames = [(files[file], line, caller) for file, line, _, caller in program["frames"]]
    assert frames == [("app/train.py", 9, -1), ("app/train.py", 4, 0), ("app/train.py", 5, 0)]
    made = {len(op.source.callers) for op in found.last.root.ops if op.type != "c_allreduce_sum"}
    assert made == {2}
    text = (tmp_path / "full" / "00_input.txt").read_text()
    assert "train.py:9" not in text


def test_calls_beside_a_dump_that_do_not_fit_it_are_left_out(tmp_path: Path) -> None:
    run_pipeline(with_calls(deep_step(1)), [], instruments=[Dump(tmp_path)])
    data = json.loads((tmp_path / "frames.json").read_text())
    data["stages"]["00_input"] = [99, -7]
    data["frames"][0][3] = 5
    (tmp_path / "frames.json").write_text(json.dumps(data))
    (found,) = read_folders(tmp_path)
    assert {op.source.callers for op in found.last.root.ops} == {()}


def test_a_file_beside_a_dump_that_is_damaged_is_named(tmp_path: Path) -> None:
    write_dump(tmp_path)
    (tmp_path / "step.json").write_text("{")
    with pytest.raises(TextError, match=r"step\.json cannot be read"):
        read_folders(tmp_path)


@pytest.mark.parametrize(
    ("name", "data"),
    [("frames.json", {"frames": [["a.py", 1]]}),
     ("frames.json", {"frames": [["a.py", "one", "f", -1]]}),
     ("frames.json", {"frames": 3}),
     ("frames.json", {"stages": {"00_input": ["x"]}}),
     ("frames.json", {"stages": []}),
     ("sources.json", {"a.py": ["x = 1"]}),
     ("sources.json", {"a.py": {"first": "x = 1"}})],
)  # fmt: skip
def test_a_file_beside_a_dump_with_other_data_is_named(
    name: str, data: object, tmp_path: Path
) -> None:
    write_dump(tmp_path)
    (tmp_path / name).write_text(json.dumps(data))
    with pytest.raises(TextError, match=rf"{name} is not what a dump contains") as caught:
        read_folders(tmp_path)
    assert caught.value.hint == "remove it; the programs are readable without it"


@pytest.mark.parametrize("facts", [None, 3, [1], [["one"]], {"a": "b"}])
def test_facts_of_another_form_are_left_out(facts: object, tmp_path: Path) -> None:
    write_dump(tmp_path)
    write_facts(tmp_path, {"facts": facts})
    (found,) = read_folders(tmp_path)
    assert found.facts == []
