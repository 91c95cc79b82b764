"""Compiled functions are cached in the user's cache folder, and nowhere else."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxfleet.env import read_cache_dir
from jaxfleet.tables.numba_jit import compiled, inlined

ROOT = Path(__file__).resolve().parents[2]


@inlined
def twice(value: int) -> int:
    return 2 * value


@compiled("i64[]", "i64[]!", "i64")
def doubled(values: np.ndarray, results: np.ndarray, more: int) -> int:
    for i in range(len(values)):
        results[i] = twice(values[i]) + more
    return len(values)


def test_compiled_functions_call_inlined_ones() -> None:
    results = np.empty(3, np.int64)
    assert doubled(np.arange(3), results, 5) == 3
    assert results.tolist() == [5, 7, 9]
    with pytest.raises(NotImplementedError, match="only compiled functions"):
        twice(1)


def test_other_types_are_refused_rather_than_compiled_anew() -> None:
    with pytest.raises(TypeError, match="No matching definition"):
        doubled(np.arange(3.0), np.empty(3, np.int64), 5)


SCRIPT = """
import sys
import jaxfleet.fluid, jaxfleet.tables
assert "numba" not in sys.modules, "imported before anything is compiled"
import numba, numpy as np
numba.config.CACHE_DIR = before = "of the user"
jaxfleet.tables.TableStore(jaxfleet.tables.TableSpec(name="t", dim=2)).look_up(np.arange(3))
assert numba.config.CACHE_DIR == before
"""


@pytest.mark.grid
@pytest.mark.processes
def test_they_are_kept_in_the_cache_folder_alone(tmp_path: Path) -> None:
    before = {*ROOT.glob("jaxfleet/**/*.nb?")}
    kept = tmp_path / "kept"
    ages = []
    for _ in range(2):
        environment = os.environ | {"JAXFLEET_CACHE_DIR": str(kept), "PYTHONPATH": str(ROOT)}
        subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, cwd=tmp_path, check=True, timeout=100
        )
        files = [*kept.glob("tables-*/**/*.nbc")]
        assert len(files) > 3
        ages.append({path: path.stat().st_mtime_ns for path in files})
    assert ages[0] == ages[1]  # the second process compiled nothing
    assert {*ROOT.glob("jaxfleet/**/*.nb?")} == before
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_the_environment_says_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAXFLEET_CACHE_DIR", "")
    assert read_cache_dir() is None
    monkeypatch.setenv("JAXFLEET_CACHE_DIR", str(tmp_path))
    assert read_cache_dir() == tmp_path
    monkeypatch.delenv("JAXFLEET_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read_cache_dir() == tmp_path / "jaxfleet"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_cache_dir() == tmp_path / ".cache" / "jaxfleet"
