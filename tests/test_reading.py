"""Output of the digits example, and the dumps of its programs."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from jaxfleet.ir import Kind, load_program
from tests.compiling import quickly

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES = 120
LONGEST_S = 250.0  # a run takes about 8 s; more on a busy machine
PARAMETERS = 10

pytestmark = [pytest.mark.processes, pytest.mark.grid]


@dataclass(frozen=True)
class Ran:
    """A run of the example.

    Attributes:
        lines: its output.
        dumps: the folder of its dumps.
    """

    lines: list[str]
    dumps: Path


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("dumps")
    with quickly():
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "digits.py"), "--epochs", "1"],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "JAXFLEET_DUMP_DIR": str(folder),
                "JAXFLEET_DUMP_SOURCE": "1",
            },
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    (found,) = [path for path in folder.iterdir() if path.is_dir()]
    return Ran(done.stdout.splitlines(), found)


@pytest.fixture(scope="module")
def dumps(ran: Ran) -> Path:
    return ran.dumps


def test_the_example_prints_plain_lines_where_there_is_no_terminal(ran: Ran) -> None:
    first, *explained, last = ran.lines
    assert re.fullmatch(r"epoch 1: loss [\d.]+  accuracy [\d.]+", first)
    assert len(explained) == 8
    assert explained[0].startswith("step 'train_step': ")
    assert any("4 cpu devices" in line for line in explained)
    accuracy = re.fullmatch(r"test accuracy (\d\.\d{3})", last)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.5


def views(dumps: Path) -> list[Path]:
    """Returns the numbered files, which are views for readers."""
    found = sorted(dumps.glob("[0-9][0-9]_*.txt"))
    assert found, "no dumps"
    return found


def test_the_program_after_each_pass_fits_on_two_screens(dumps: Path) -> None:
    for path in views(dumps):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= MOST_LINES, f"{path.name} has {len(lines)} lines"


def test_only_passes_that_changed_something_are_dumped(dumps: Path) -> None:
    changed = [line.split()[0] for line in (dumps / "index.txt").read_text().splitlines()[1:]
               if line.split()[1] == "changed"]  # fmt: skip
    assert [path.stem for path in views(dumps)[1:]] == changed
    assert [path.stem for path in sorted(dumps.glob("*.diff"))] == changed


def test_each_all_reduce_says_which_pass_put_it_there_for_what_and_from_which_line(
    dumps: Path,
) -> None:
    program = load_program(dumps / "full" / "00_input.txt")
    params = {variable.name for variable in program.of_kind(Kind.PARAM)}
    assert len(params) == PARAMETERS
    (dump,) = dumps.glob("*_grad_allreduce.txt")
    asked = re.compile(
        r"(\S+@GRAD) = c_allreduce_sum\(\1\) \{.*\} for \((\S+), \1\)"
        r"  # (\S+digits\.py):(\d+), in (\S+);.* by grad_allreduce$"
    )
    answers = [match for line in dump.read_text().splitlines() if (match := asked.search(line))]
    assert {match[2] for match in answers} == params
    code = (ROOT / "examples" / "digits.py").read_text(encoding="utf-8").splitlines()
    for match in answers:
        module = match[2].split("/")[1].split("_")[0]  # params/Conv_0/kernel
        named = {"Conv": "Conv(", "BatchNorm": "BatchNorm(", "Dense": "Dense("}[module]
        assert named in code[int(match[4]) - 1], match[0]


def test_no_gradient_is_reduced_before_the_pass_that_does_it(dumps: Path) -> None:
    assert "c_allreduce" not in views(dumps)[0].read_text(encoding="utf-8")


def test_the_diff_of_a_pass_shows_what_it_did(dumps: Path) -> None:
    (path,) = dumps.glob("*_grad_allreduce.diff")
    added = [line for line in path.read_text().splitlines() if line.startswith("+ ")]
    assert sum("c_allreduce_sum" in line for line in added) > PARAMETERS


def test_every_full_dump_is_a_program_again(dumps: Path) -> None:
    for path in sorted((dumps / "full").glob("*.txt")):
        program = load_program(path)
        assert program.op_count > 100  # the whole step, not a view
