"""Sources of operators: how messages name a line of the user's program."""

from pathlib import Path

import pytest

from jaxfleet.ir import Source


def test_a_place_has_its_line_of_text(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import jax\n    loss = 1\n")
    source = Source(str(script), line=2, function="step")
    assert source.where() == f"{tmp_path.name}/train.py:2, in step\n    loss = 1"


@pytest.mark.parametrize("line", [-1, 0, 3])
def test_a_line_beyond_the_file_has_no_text(tmp_path: Path, line: int) -> None:
    script = tmp_path / "train.py"
    script.write_text("import jax\nloss = 1\n")
    source = Source(str(script), line=line, function="step")
    assert source.where() == f"{tmp_path.name}/train.py:{line}, in step"


@pytest.mark.parametrize("file", ["\ud800", "a\0b", "no/such/file.py"])
def test_a_file_that_cannot_be_read_has_no_text(file: str) -> None:
    assert Source(file, line=1, function="step").where() == f"{file}:1, in step".removeprefix("no/")
