"""`python -m jaxfleet.compat` runs scripts that import paddle, unchanged."""

import subprocess
import sys
from pathlib import Path

import pytest

import jaxfleet.compat
from jaxfleet.cli import launch as launch_command
from jaxfleet.compat import __main__ as running
from jaxfleet.launch import paddle_launch, paddle_launch_ps

SCRIPT = """\
from __future__ import print_function
import sys

import numpy as np
import paddle.fluid as fluid
from helper import ROWS

x = fluid.data(name="x", shape=[None, 2], dtype="float32")
y = fluid.data(name="y", shape=[None, 1], dtype="float32")
out = fluid.layers.fc(input=x, size=1)
loss = fluid.layers.mean(fluid.layers.square_error_cost(input=out, label=y))
fluid.optimizer.SGD(learning_rate=0.1).minimize(loss)
exe = fluid.Executor(fluid.CPUPlace())
exe.run(fluid.default_startup_program())
feed = {"x": np.ones((ROWS, 2), "float32"), "y": np.ones((ROWS, 1), "float32")}
losses = [float(exe.run(feed=feed, fetch_list=[loss])[0]) for _ in range(5)]
print("%s %d %s" % (__name__, len(losses), sys.argv[1:]))
assert losses[-1] < losses[0], "%f" % losses[-1]
"""


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")  # main()'s change is undone with the test


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("ROWS = 4\n")
    found = tmp_path / "train.py"
    found.write_text(SCRIPT)
    return found


@pytest.mark.processes
def test_a_script_runs_unchanged_with_its_future_import_on_line_one(script: Path) -> None:
    words = [sys.executable, "-m", "jaxfleet.compat", str(script), "--epochs", "3"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "__main__ 5 ['--epochs', '3']\n"


@pytest.mark.processes
def test_a_process_that_a_script_starts_finds_paddle_too(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text("import paddle.fluid as fluid\nprint(fluid.__name__)\n")
    parent = tmp_path / "parent.py"
    parent.write_text(
        "import os, subprocess, sys\n"
        "import paddle.fluid\n"
        "child = os.path.join(os.path.dirname(__file__), 'child.py')\n"
        "print(subprocess.check_output([sys.executable, child], text=True), end='')\n"
    )
    words = [sys.executable, "-m", "jaxfleet.compat", str(parent)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "paddle.fluid\n"), done.stderr


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("paddle.distributed.launch", paddle_launch),
        ("paddle.distributed.launch_ps", paddle_launch_ps),
    ],
)
def test_paddles_launches_run_their_script_in_the_same_way(
    name: str, module: object, monkeypatch: pytest.MonkeyPatch, script: Path
) -> None:
    started: list[tuple[str, ...]] = []

    def starts(job: object, **options: object) -> int:
        started.append(getattr(job, "command", None) or job.trainer)  # type: ignore[attr-defined]
        return 0

    starter = "launch_ranks" if module is paddle_launch else "launch_job"
    monkeypatch.setattr(module, starter, starts)
    try:
        assert running.main(["-m", name, "--print_config", "false", str(script), "a"]) == 0
    finally:
        jaxfleet.compat.uninstall()
    assert started == [(sys.executable, "-u", "-m", "jaxfleet.compat", str(script), "a")]


def test_a_launch_with_compat_runs_its_script_so(script: Path) -> None:
    under = ("-m", "jaxfleet.compat")
    found = launch_command._command(str(script), ["a"], module=False, under=under)  # noqa: SLF001
    assert found == (sys.executable, "-m", "jaxfleet.compat", str(script), "a")


@pytest.mark.parametrize("words", [[], ["-m"], ["no_such_script.py"]])
def test_what_cannot_be_run_is_a_users_error(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert running.main(words) == 2
    finally:
        jaxfleet.compat.uninstall()
    assert capsys.readouterr().err
