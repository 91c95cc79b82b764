"""The examples do what their docstrings promise, from any folder and on any output.

All of them run in the grid: once for a few steps, compiled quickly, and in every mode until they
have converged.
"""

import os
import pty
import re
import subprocess
import sys
import termios
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.compiling import quickly

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 280.0
LEAST_ACCURACY = 0.97
MOST_BITS = 2.5

pytestmark = pytest.mark.processes


def command(name: str, *options: str) -> list[str]:
    return [sys.executable, str(ROOT / "examples" / f"{name}.py"), *options]


def environment() -> dict[str, str]:
    """Returns an environment in which jaxfleet is the checkout's."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def run(folder: Path, name: str, *options: str) -> list[str]:
    """Runs an example in a folder; returns its lines."""
    done = subprocess.run(
        command(name, *options),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


def run_on_a_terminal(folder: Path, name: str, *options: str) -> str:
    """Runs an example on a pseudo-terminal; returns its whole output."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (24, 80))  # a pseudo-terminal has no width for the progress bar
    process = subprocess.Popen(
        command(name, *options), cwd=folder, env=environment(), stdout=its, stderr=its
    )
    os.close(its)
    written = b""
    try:
        while piece := _read(ours):
            written += piece
        assert process.wait(DEADLINE_S) == 0, written.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return written.decode()


def _read(terminal: int) -> bytes:
    """Returns the next output; empty once the other end is closed."""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # on Linux, once no process has the terminal open
        return b""


@dataclass(frozen=True)
class Short:
    """A run of an example for a few steps.

    Attributes:
        options: of the script.
        last: pattern of its last line.
        bounds: of the number in that line.
    """

    options: tuple[str, ...]
    last: str
    bounds: tuple[float, float]


SHORT = {
    "transformer": Short(
        ("--steps", "4", "--devices", "2"),
        r"held-out bits per character: (\d\.\d\d)",
        (3.0, 5.5),  # for 96 characters the logarithm is 6.6
    ),
    "ctr": Short(
        ("--rows", "20000"),
        r"test AUC (\S+), of the truth that is known \S+, of all \S+",
        (0.66, 0.75),
    ),
    "data_loader": Short(("--epochs", "2"), r"test accuracy (\d\.\d{3})", (0.5, 1.0)),
    "tensorboard": Short(
        ("--steps", "40"),
        r"accuracy (\S+) at step 40; the metrics of 4 steps are in runs/digits",
        (0.7, 1.0),
    ),
    "fluid/lenet_digits": Short(
        ("--mode", "parallel", "--epochs", "1"), r"test accuracy (\d\.\d{3})", (0.5, 1.0)
    ),
    "fluid/word2vec": Short(("--epochs", "1"), r"perplexity (\d+), by frequency \d+", (50, 140)),
    "fluid/ctr_dnn": Short(("--epochs", "1"), r"AUC (\d\.\d{3}) of 0\.875", (0.83, 0.876)),
    "fluid/fit_a_line": Short(
        ("--epochs", "6"), r"test error ([\d.]+), least squares 58\.9", (58.0, 61.8)
    ),
    "fluid/fleet_fit_a_line": Short(
        ("--epochs", "6"), r"test error ([\d.]+), least squares 58\.9", (58.0, 61.8)
    ),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", SHORT)
def test_an_example_begins_to_learn(tmp_path: Path, name: str) -> None:
    short = SHORT[name]
    with quickly():
        lines = run(tmp_path, name, *short.options)
    found = re.fullmatch(short.last, lines[-1])
    assert found is not None, lines[-1]
    assert short.bounds[0] <= float(found[1]) <= short.bounds[1]


@pytest.mark.grid
def test_collective_learns_over_two_processes(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "collective.py")
    options = ["--epochs", "2", "--checkpoint", "saved"]
    with quickly():
        lines = launch(tmp_path, script, *options, of=("--nproc", "2"))
    assert (tmp_path / "saved").is_dir()
    first, second = losses(lines)
    assert second < first
    (last,) = [line for line in lines if "test accuracy" in line]
    assert last.startswith("rank 0 | ")


@pytest.mark.grid
def test_digits_learns_and_prints_plain_lines(tmp_path: Path) -> None:
    lines = run(tmp_path, "digits")
    epochs = [
        line for line in lines if re.fullmatch(r"epoch \d+: loss [\d.]+  accuracy [\d.]+", line)
    ]
    assert len(epochs) == 15
    assert not [line for line in lines if "\r" in line or "%|" in line]
    explained = lines[15:-1]
    assert len(explained) == 8
    assert explained[0].startswith("step 'train_step': ")
    assert any("4 cpu devices" in line for line in explained)
    accuracy = re.fullmatch(r"test accuracy (\d\.\d{3})", lines[-1])
    assert accuracy is not None
    assert float(accuracy[1]) >= LEAST_ACCURACY


@pytest.mark.grid
def test_digits_draws_a_progress_bar_on_a_terminal(tmp_path: Path) -> None:
    written = run_on_a_terminal(tmp_path, "digits", "--epochs", "2")
    assert "100%|" in written
    assert "\r" in written
    assert "epoch 1:" not in written
    assert "test accuracy" in written.splitlines()[-1]


@pytest.mark.grid
def test_transformer_learns(tmp_path: Path) -> None:
    lines = run(tmp_path, "transformer")
    assert all(re.fullmatch(r"step +\d+: [\d.]+ bits per character", line) for line in lines[:-1])
    bits = re.fullmatch(r"held-out bits per character: (\d\.\d\d)", lines[-1])
    assert bits is not None
    assert float(bits[1]) <= MOST_BITS


@pytest.mark.grid
def test_digits_learns_with_servers_and_trainers_as_on_one_device(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "digits.py")
    together = launch(tmp_path, script, "--mode", "pserver", "--epochs", "2")
    alone = run(tmp_path, "digits", "--mode", "single", "--epochs", "2")
    assert any("1 cpu device" in line for line in alone)
    assert alone[-1].startswith("test accuracy ")
    expected = losses(alone)
    assert len(expected) == 2
    for trainer in ("trainer 0", "trainer 1"):
        found = losses([line for line in together if line.startswith(trainer)])
        # 36 steps of BatchNorm and Adam with sums in another order; 4 digits are printed.
        assert found == pytest.approx(expected, rel=5e-3)


def losses(lines: list[str]) -> list[float]:
    found = (re.search(r"epoch \d+: loss ([\d.]+)", line) for line in lines)
    return [float(match[1]) for match in found if match is not None]


# After few epochs each figure is below the one in the example's docstring.
OF_FLUID = [
    ("lenet_digits", "parallel", "3", r"test accuracy (\d\.\d{3})", (0.9, 1.0)),
    ("word2vec", "single", "1", r"perplexity (\d+), by frequency \d+", (50, 140)),
    ("ctr_dnn", "single", "1", r"AUC (\d\.\d{3}) of 0\.875", (0.845, 0.876)),
]


@pytest.mark.grid
@pytest.mark.parametrize(("name", "mode", "epochs", "last", "bounds"), OF_FLUID)
def test_a_fluid_script_learns(
    *, tmp_path: Path, name: str, mode: str, epochs: str, last: str, bounds: tuple[float, float]
) -> None:
    lines = run(tmp_path, f"fluid/{name}", "--mode", mode, "--epochs", epochs)
    found = re.fullmatch(last, lines[-1])
    assert found is not None, lines[-1]
    assert bounds[0] <= float(found[1]) <= bounds[1]


@pytest.mark.grid
def test_a_fluid_script_fits_the_same_line_in_each_of_its_modes(tmp_path: Path) -> None:
    options = ["--servers-run-script", str(ROOT / "examples" / "fluid" / "fit_a_line.py")]
    lines = launch(tmp_path, *options, "--mode", "pserver", "--epochs", "6")
    last = [line.partition(" | ")[2] for line in lines if "test error" in line]
    for mode in ("single", "parallel"):
        alone = run(tmp_path, "fluid/fit_a_line", "--mode", mode, "--epochs", "6")
        last.append(alone[-1])
    found = [re.fullmatch(r"test error ([\d.]+), least squares ([\d.]+)", one) for one in last]
    errors = [float(match[1]) for match in found if match is not None]
    assert errors == pytest.approx([errors[0]] * 4, abs=0.1), last  # one digit is printed
    assert found[0] is not None
    assert errors[0] <= 1.05 * float(found[0][2])


@pytest.mark.grid
def test_a_launched_script_of_the_fleet_fits_a_line(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "fluid" / "fleet_fit_a_line.py")
    lines = launch(tmp_path, "--servers-run-script", script, "--epochs", "6")
    (last,) = [line for line in lines if "test error" in line]
    found = [float(number) for number in re.findall(r"\d+\.\d+", last)]
    assert found[0] <= 1.05 * found[1]


@pytest.mark.grid
def test_a_fluid_script_learns_with_a_table_of_servers(tmp_path: Path) -> None:
    options = ["--servers-run-script", str(ROOT / "examples" / "fluid" / "ctr_dnn.py")]
    table = ["--mode", "pserver", "--epochs", "1", "--table", "distributed"]
    lines = launch(tmp_path, *options, *table)
    (found,) = [match for line in lines if (match := re.search(r"AUC (\d\.\d{3}) of 0\.875", line))]
    assert 0.84 <= float(found[1]) <= 0.876


@pytest.mark.grid
def test_collective_learns_over_two_processes_as_in_one(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "collective.py")
    options = ["--epochs", "4", "--checkpoint", "saved"]
    together = launch(tmp_path, script, *options, of=("--nproc", "2"))
    assert (tmp_path / "saved").is_dir()
    alone = run(tmp_path, "collective", "--epochs", "4")
    assert len(losses(alone)) == 4
    # Each rank sums half of each batch; 4 digits are printed.
    assert losses(together) == pytest.approx(losses(alone), rel=5e-3)
    (again,) = [line for line in together if "test accuracy" in line]
    assert again.startswith("rank 0 | ")
    accuracies = [float(line.rpartition(" ")[2]) for line in (again, alone[-1])]
    assert accuracies == pytest.approx([0.93, 0.93], abs=0.04), accuracies


def launch(
    folder: Path, *words: str, of: Sequence[str] = ("--servers", "2", "--trainers", "2")
) -> list[str]:
    """Runs a script as a job; returns the output of all its processes."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxfleet", "launch", *of, *words],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


def ratings_wheel(folder: Path) -> None:
    """Writes a wheel as pip downloads it, with ratings explained by biases and some noise."""
    random = np.random.default_rng(0)
    user, movie = random.integers(1, 60, 4000), random.integers(1, 40, 4000)
    taste = random.normal(size=60)[user] * 0.8 + random.normal(size=40)[movie] * 0.8
    rating = np.clip(np.round(3.5 + taste + random.normal(size=4000) * 0.2), 1, 5)
    rows = zip(user, movie, rating, strict=True)
    lines = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
    lines += [f"{u}\t{m}\t{r:.0f}\t0" for u, m, r in rows]
    with zipfile.ZipFile(folder / "recbole-1.2.1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("recbole/dataset_example/ml-100k/ml-100k.inter", "\n".join(lines))


@pytest.mark.grid
def test_movielens_learns_the_ratings_that_it_is_given(tmp_path: Path) -> None:
    ratings_wheel(tmp_path)
    lines = run(tmp_path, "movielens", "--folder", str(tmp_path), "--epochs", "12")
    found = float(lines[-1].removeprefix("test RMSE "))
    assert found < 0.6  # the mean alone gives 1.1; rounding and noise give 0.4


@pytest.mark.grid
@pytest.mark.parametrize("options", [[], ["--mode", "collective"]])
def test_ctr_comes_near_to_what_can_be_known(tmp_path: Path, options: list[str]) -> None:
    lines = run(tmp_path, "ctr", "--rows", "60000", *options)
    match = re.fullmatch(r"test AUC (.*), of the truth that is known (.*), of all (.*)", lines[-1])
    assert match is not None
    found, known, ceiling = map(float, match.groups())
    assert known - 0.06 < found < known < ceiling
