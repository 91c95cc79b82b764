"""Old scripts find jaxfleet's front end under the old names."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import jaxfleet.compat
from jaxfleet import fluid
from jaxfleet.compat.installing import MODULES
from jaxfleet.errors import ProgramError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed() -> Iterator[ModuleType]:
    """Installs and yields `paddle`, and removes it at the end."""
    jaxfleet.compat.install()
    yield sys.modules["paddle"]
    jaxfleet.compat.uninstall()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", MODULES)
def test_a_name_can_be_imported_and_stands_for_something(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__name__ == name
    assert [found for found in dir(module) if not found.startswith("_")]
    package, _, last = name.rpartition(".")
    if package:
        assert getattr(importlib.import_module(package), last) is module


def test_what_is_found_is_ours(installed: ModuleType) -> None:
    paddle = importlib.import_module("paddle.fluid")
    assert paddle.Program is fluid.Program
    assert paddle.layers.fc is fluid.layers.fc
    assert paddle.framework.Parameter is fluid.Parameter
    assert installed.static.program_guard is fluid.program_guard
    assert paddle.core.VarDesc.VarType.FP32 == "float32"


def test_installing_again_changes_nothing(installed: ModuleType) -> None:
    fluids = sys.modules["paddle.fluid"]
    jaxfleet.compat.install()
    assert sys.modules["paddle"] is installed
    assert sys.modules["paddle.fluid"] is fluids


@pytest.mark.usefixtures("installed")
def test_uninstalling_leaves_nothing() -> None:
    jaxfleet.compat.uninstall()
    assert not [name for name in sys.modules if name.split(".")[0] == "paddle"]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("paddle.fluid.layers")
    jaxfleet.compat.uninstall()  # repeated calls are allowed


def test_a_real_paddle_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType("paddle")
    real.__file__ = "/site-packages/paddle/__init__.py"
    monkeypatch.setitem(sys.modules, "paddle", real)
    with pytest.raises(ProgramError, match="another paddle has been imported: /site-packages"):
        jaxfleet.compat.install()
    jaxfleet.compat.uninstall()
    assert sys.modules["paddle"] is real


@pytest.mark.usefixtures("installed")
def test_a_name_that_is_missing_is_an_import_error_that_says_what_is_near() -> None:
    layers = importlib.import_module("paddle.fluid.layers")
    with pytest.raises(AttributeError, match=r"no 'paddle.fluid.layers.sofmax'.*softmax"):
        _ = layers.sofmax
    with pytest.raises(ImportError, match="cannot import name 'yolov3_loss'"):
        exec("from paddle.fluid.layers import yolov3_loss")  # noqa: S102
    with pytest.raises(ModuleNotFoundError, match=r"paddle\.fluid\.debugger"):
        importlib.import_module("paddle.fluid.debugger")


@pytest.mark.usefixtures("installed")
def test_a_star_takes_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from paddle.fluid.layers import *", names)  # noqa: S102
    assert names["fc"] is fluid.layers.fc
    assert "_unary" not in names


@pytest.mark.grid
@pytest.mark.processes
def test_devices_may_be_asked_for_after_the_import() -> None:
    script = """
import jaxfleet.compat
jaxfleet.compat.install()
import paddle, paddle.fluid as fluid
paddle.enable_static()
fluid.core.is_compiled_with_cuda()
fluid.layers.fc(fluid.data("x", [None, 2]), 3)
fluid.optimizer.SGD(0.1)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
import jaxfleet as jf
jf.emulate_devices(3)
import jax
print(len(jax.devices()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.stdout == "3\n", done.stderr
