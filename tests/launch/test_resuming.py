"""A job that starts again as a whole resumes from what it saved without a line in the script."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.test_elastic import LONGEST_S, ended, finals, same

SCRIPT = Path(__file__).with_name("resuming.py")
SHAPES = {
    "collective": ["--nproc", "2"],
    "pserver": ["--servers", "2", "--trainers", "2", "--spares", "0"],
}

# By default, `tests/runtime/test_periodic_saves.py` saves and resumes in one process, and
# `tests/faults/test_periodic_saves.py` in jobs on the network in memory.
pytestmark = [pytest.mark.processes, pytest.mark.grid, pytest.mark.timeout(2 * LONGEST_S + 60)]


def started(
    mode: str, folder: Path, *options: str, dying: tuple[str, ...] = ()
) -> "subprocess.Popen[str]":
    folder.mkdir(exist_ok=True)
    words = [sys.executable, "-m", "jaxfleet", "launch", "--threads", "1", *SHAPES[mode]]
    words += [*options, "--timeout", str(LONGEST_S), "-m", "tests.launch.resuming"]
    return subprocess.Popen(
        [*words, mode, str(folder), *dying],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.parametrize("mode", SHAPES)
@pytest.mark.parametrize("every", ["3steps", "0.001s"])
def test_a_job_goes_on_from_its_last_periodic_checkpoint(
    mode: str, every: str, tmp_path: Path
) -> None:
    (out,) = ended(started(mode, tmp_path / "undisturbed"))
    assert out.count("begins at 0 in start 0") == 2, out
    undisturbed = finals(tmp_path / "undisturbed")
    saved = ["--save-every", every, "--save-to", str(tmp_path / "saved"), "--job", "own"]
    job = started(mode, tmp_path / "killed", "--max-restarts", "1", *saved, dying=("1", "5"))
    (out,) = ended(job)
    done = 3 if every == "3steps" else 4
    assert out.count(f"begins at {done} in start 1") == 2, out
    assert re.search(r"started again \(1 of 1\)", out), out
    assert f"checkpoint 1 of the job, after step {done}" in out, out
    assert same(finals(tmp_path / "killed"), undisturbed)
    # A launch of the same job goes on, too: here after the last step but two, or the last.
    (out,) = ended(started(mode, tmp_path / "later", *saved))
    assert out.count(f"begins at {6 if every == '3steps' else 8} in start 0") == 2, out
