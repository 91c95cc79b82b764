"""A script of the fleet, started by `jaxfleet launch`, trains as one process does."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxfleet import fluid
from tests.fluid.fleet import script
from tests.fluid.nets import fresh

LONGEST_S = 200.0
CLOSE = 1e-4  # sums of other rows round differently, and Adam divides by them

pytestmark = [pytest.mark.processes, pytest.mark.timeout(500)]


def launch(folder: Path, *options: str) -> str:
    """Runs the job: a server and two workers; returns their output."""
    folder.mkdir()
    roles = ["--servers", "1", "--trainers", "2", "--servers-run-script"]
    command = [sys.executable, "-m", "jaxfleet", "launch", *roles, str(Path(script.__file__))]
    done = subprocess.run(
        [*command, "--out", str(folder), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    print(done.stdout)  # noqa: T201  # of what failed
    assert done.returncode == 0
    return done.stdout


def losses(folder: Path) -> np.ndarray:
    """Returns the mean of the workers' losses at each step."""
    mean: np.ndarray = np.mean([np.load(folder / f"losses{n}.npy") for n in range(2)], axis=0)
    return mean


@pytest.mark.grid
def test_a_job_goes_as_one_process_and_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    first, then = tmp_path / "first", tmp_path / "then"
    wrote = launch(first)
    assert "worker 0 has ['a', 'b']" in wrote
    assert "worker 1 has ['c']" in wrote
    assert "server 0 has served" in wrote
    launch(then, "--model-dir", str(first / "kept"), "--first", "3")
    exe, scope = fluid.Executor(), fluid.Scope()
    with fresh() as (main, startup), fluid.scope_guard(scope):
        loss, predicted = script.begin()
        used = main.clone(for_test=True)
        fluid.optimizer.Adam(0.01).minimize(loss)
        exe.run(startup)
        alone, guessed = [], []
        for step in range(6):
            (value,) = exe.run(main, feed=script.batch(step), fetch_list=[loss])
            alone.append(float(value[0]))
            if step in {2, 5}:
                fed = script.batch(9)
                guessed.append(exe.run(used, feed=fed, fetch_list=[predicted])[0])
    np.testing.assert_allclose([*losses(first), *losses(then)], alone, rtol=CLOSE)
    for folder, wanted in zip((first, then), guessed, strict=True):
        with fluid.scope_guard(fluid.Scope()):
            program, fed, fetch = fluid.io.load_inference_model(str(folder / "model"), exe)
            (found,) = exe.run(program, feed={fed[0]: script.batch(9)["x"]}, fetch_list=fetch)
        np.testing.assert_allclose(found, wanted, atol=CLOSE)
