"""docs/writing-passes.md, executed: its files, its tests, its commands and its step."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.cli import main
from jaxfleet.errors import PassError
from jaxfleet.pipeline import registered_passes, registry
from jaxfleet.pipeline.registry import _PASSES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "writing-passes.md"
STEP = """\
program p
  data  x: f32[4]
  param w: f32[4]
  block 0
    backward
      w@GRAD: f32[4] = jax.neg(x) for (w, w@GRAD)
    optimize
      w = jax.add(w, w@GRAD)
"""
RUN_TESTS = """
import test_my_passes

for name, test in list(vars(test_my_passes).items()):
    if name.startswith("test_"):
        test()
print("ran")
"""
TX = jf.distributed_optimizer(optax.sgd(1.0))


def files_of_the_page() -> dict[str, str]:
    blocks = re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return dict(blocks)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the page's files, in which the process stands."""
    for name, text in files_of_the_page().items():
        (tmp_path / name).write_text(text)
    (tmp_path / "step.txt").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    registry.load_plugins.cache_clear()
    yield tmp_path
    registry.load_plugins.cache_clear()
    _PASSES.pop("clip_gradients", None)
    sys.modules.pop("my_passes", None)


def test_the_page_has_a_pass_and_its_tests() -> None:
    assert files_of_the_page().keys() == {"my_passes.py", "test_my_passes.py"}


def test_the_tests_of_the_page_pass_without_hypothesis(folder: Path) -> None:
    # jaxfleet.testing is for users, who need not have hypothesis.
    (folder / "hypothesis.py").write_text("raise ImportError('not installed here')")
    root = str(PAGE.parents[1])
    done = subprocess.run(
        [sys.executable, "-c", RUN_TESTS],
        cwd=folder, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert done.stdout == "ran\n", done.stderr


def test_the_commands_of_the_page_know_the_imported_pass(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["passes", "--import", "my_passes"]) == 0
    assert "clip_gradients: Clamps every element of every gradient" in capsys.readouterr().out
    words = ["opt", "--import", "my_passes", "--passes=clip_gradients{limit=0.5},dce", "step.txt"]
    assert main(words) == 0
    assert "w@GRAD = jax.clamp(-0.5:f32, w@GRAD, 0.5:f32)" in capsys.readouterr().out


def test_a_module_that_cannot_be_imported_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["passes", "--import", "my_passes.py"]) == 2
    told = capsys.readouterr().err
    assert "--import my_passes.py: ModuleNotFoundError" in told
    assert "not my_passes.py" in told


def test_an_installed_plug_in_needs_no_import(folder: Path) -> None:
    info = folder / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[jaxfleet.passes]\nmine = my_passes\n")
    sys.path.insert(0, str(folder))
    assert registry.load_plugins() == ("mine",)
    assert "clip_gradients" in registered_passes()


def test_a_broken_plug_in_is_named_with_its_package(folder: Path) -> None:
    info = folder / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[jaxfleet.passes]\nmine = no_such_module\n")
    sys.path.insert(0, str(folder))
    with pytest.raises(PassError, match="passes of broken cannot be loaded: no_such_module"):
        registry.load_plugins()


def test_a_strategy_runs_the_pass_behind_the_all_reduce(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    __import__("my_passes")

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        loss, grads = jax.value_and_grad(lambda w: jnp.sum(batch @ w))(state["w"])
        updates, opt = TX.update(grads, state["opt"], state["w"])
        return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, loss

    w, batch = jnp.zeros(2), jnp.asarray([[0.01, 5.0]] * 8)
    example = ({"w": w, "opt": TX.init(w)}, batch)
    strategy = jf.DistributedStrategy(devices=4, passes="clip_gradients{limit=0.5}")
    step = jf.distribute(train_step, example, strategy)
    state, _ = step(*example)
    after = np.asarray(state["w"], np.float64)
    np.testing.assert_allclose(after, [-0.08, -0.5], rtol=1e-6)


def test_the_version_names_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith(f"jaxfleet {jf.__version__} (jax {jax.__version__}, ")
