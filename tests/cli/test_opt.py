"""`jaxfleet opt`."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxfleet.cli import main
from jaxfleet.ir import Block, Kind, Operands, Operator, Program, Variable
from jaxfleet.ir.serialization import load_program, save_program
from jaxfleet.ir.variable import make_constant

DEAD = """\
program p
  data  x: f32[4]
  param w: f32[4]
  block 0
    forward
      t: f32[4] = jax.neg(x)  # model/train.py:7, in step
      w = jax.add(w, x)  # model/train.py:8, in step
"""
LIVE = """\
program p
  data  x: f32[4]
  param w: f32[4]
  block 0
    forward
      w = jax.add(w, x)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "step.txt"
    path.write_text(DEAD)
    return str(path)


def test_passes_run_on_a_file_and_the_result_is_printed(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["opt", "--passes=dce", file]) == 0
    assert capsys.readouterr() == (LIVE, "")


@pytest.mark.parametrize("words", [["-"], []])
def test_stdin_is_read_where_no_file_is_given(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(DEAD))
    assert main(["opt", "--passes", "dce", *words]) == 0
    assert capsys.readouterr().out == LIVE


WITHOUT_JAX = """\
import sys
from jaxfleet.cli import main

passes = "dce,fuse_allreduce,order_for_memory,memory_optimize"
failed = main(["opt", f"--passes={passes}", sys.argv[1]])
failed += main(["opt", "--verify-only", sys.argv[1]])
failed += main(["diff", sys.argv[1], sys.argv[1]])
failed += main(["passes"])
sys.exit(f"failed: {failed}, imported: {sorted({'jax', 'jaxlib'} & sys.modules.keys())}")
"""


OF_ALL = """\
program p
  data  x: f32[4]
  param w: f32[4]
  block 0
    forward
      t: f32[4] = jax.neg(x)
      s: f32[4] = c_allreduce_sum(x) {ring_id=0}
      w = jax.add(w, s)
      fetch(s)
"""


def test_passes_run_on_a_captured_program_without_jax(tmp_path: Path) -> None:
    file = tmp_path / "step.txt"
    file.write_text(OF_ALL)
    command = [sys.executable, "-c", WITHOUT_JAX, str(file)]
    done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "failed: 0, imported: []"


def test_source_lines_are_printed_on_request(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["opt", "--source", file]) == 0
    assert capsys.readouterr().out == DEAD


def test_the_result_can_go_to_a_file(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["opt", "--passes=dce", file, "-o", str(tmp_path / "out.txt")]) == 0
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "out.txt").read_text() == LIVE


def test_each_program_of_a_file_goes_through_the_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = tmp_path / "both.txt"
    both.write_text(DEAD + DEAD.replace("program p", "program q"))
    assert main(["opt", "--passes=dce", str(both), "--dump-dir", str(tmp_path / "dump")]) == 0
    assert capsys.readouterr().out == LIVE + "\n" + LIVE.replace("program p", "program q")
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["p", "q"]


def test_what_each_pass_did_can_be_dumped(file: str, tmp_path: Path) -> None:
    for _ in range(2):
        assert main(["opt", "--passes=donate,dce", file, "--dump-dir", str(tmp_path / "d")]) == 0
    found = sorted(path.name for path in (tmp_path / "d").iterdir() if path.is_file())
    assert found == [
        "00_input.txt",
        "01_donate.diff",
        "01_donate.txt",
        "02_dce.diff",
        "02_dce.txt",
        "index.txt",
    ]


def test_tables_go_to_stderr(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["opt", "--passes=dce", "--timing", "--statistics", file]) == 0
    out, err = capsys.readouterr()
    assert out == LIVE
    assert "verify ms" in err
    assert ["jax.neg", "1", "0", "-1"] in [line.split() for line in err.splitlines()]


def test_a_program_can_be_verified_and_nothing_else(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["opt", "--verify-only", file]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"{file}: program 'p' is valid: 2 operators in 1 blocks\n"


def error_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    return err


def test_verifying_only_runs_no_passes(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--verify-only runs no passes" in error_of(
        ["opt", "--verify-only", "--passes=dce", file], capsys
    )


@pytest.mark.parametrize("words", [["--verify-only"], ["--passes=dce"]])
def test_an_invalid_program_is_named_with_the_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.txt"
    broken.write_text(DEAD.replace("jax.add(w, x)", "jax.add(w, nowhere)"))
    err = error_of(["opt", *words, str(broken)], capsys)
    assert "'nowhere' is not declared" in err
    assert "model/train.py:8, in step" in err


def test_an_unknown_pass_is_a_user_error(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    err = error_of(["opt", "--passes=dcee", file], capsys)
    assert "no pass 'dcee'" in err
    assert "hint: did you mean dce?" in err


def test_a_wrong_option_is_a_user_error(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    err = error_of(["opt", "--passes=fuse_allreduce{bucket_size=1}", file], capsys)
    assert "fuse_allreduce: no option 'bucket_size'" in err
    assert "bucket_size_bytes: int = 4194304" in err


def test_a_text_that_does_not_parse_is_named_with_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_text("program p\n  block 0\n    forward\n      = f(x)\n")
    err = error_of(["opt", str(bad)], capsys)
    assert "line 4" in err
    assert f"in {bad}" in err


def test_a_text_without_a_program_is_a_user_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("# nothing\n"))
    assert "stdin holds no program" in error_of(["opt"], capsys)


def test_bytes_that_are_no_text_are_a_user_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    assert "is not text" in error_of(["opt", str(tmp_path / "bytes")], capsys)


def test_a_missing_file_is_a_user_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.txt" in error_of(["opt", str(tmp_path / "nowhere.txt")], capsys)


def test_an_unknown_argument_is_a_user_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["opt", "--dance"])
    assert ended.value.code == 2
    assert "--dance" in capsys.readouterr().err


def test_the_values_of_constants_are_taken_along(tmp_path: Path) -> None:
    table = Variable("table", "f32", (64, 64), Kind.CONST, make_constant(np.ones((64, 64), "f4")))
    w = Variable("w", "f32", (64, 64), Kind.PARAM)
    add = Operator("jax.add", Operands.of("w", "table"), Operands.of("w"))
    program = Program("p", {"table": table, "w": w}, (Block(ops=(add,)),))
    save_program(program, tmp_path / "in.txt")
    assert main(["opt", "--passes=dce", f"{tmp_path}/in.txt", "-o", f"{tmp_path}/out.txt"]) == 0
    constant = load_program(tmp_path / "out.txt").variables["table"].constant
    assert constant is not None
    assert np.array_equal(constant.value, np.ones((64, 64)))


def test_an_abbreviated_dump_is_refused_with_the_whole_ones_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "full" / "00_input.txt"
    whole.parent.mkdir()
    whole.write_text(DEAD)
    short = tmp_path / "00_input.txt"
    short.write_text(LIVE)  # less one operator
    for command in (["opt"], ["plan"], ["diff", str(whole)]):
        assert main([*command, str(short)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.splitlines() == [
            f"error: {short} is abbreviated for reading: comments stand for some of its operators",
            f"  hint: read the whole program: {whole}",
        ]
    short.write_text(f"# the whole of it\n{DEAD}")
    assert main(["opt", str(short)]) == 0
