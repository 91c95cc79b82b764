"""Damage of any file of a chain is found; the error names the file and a remedy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet.checkpoint import CheckpointSeries, open_checkpoint, save_arrays
from jaxfleet.checkpoint.files import write_sealed
from jaxfleet.checkpoint.tables import TableSeries, load_tables, save_tables, saved_tables
from jaxfleet.errors import CheckpointError
from tests.checkpoint.tables.breaker import after, history
from tests.checkpoint.tables.kept import Kept


@pytest.fixture
def series(tmp_path: Path) -> CheckpointSeries:
    """Returns a series with a full save of step 1, and the increments of steps 2 and 3."""
    store = Kept()
    saves = TableSeries(CheckpointSeries(tmp_path), [store])
    for step in (1, 2, 3):
        history(store, step)
        saves.save(step)
    return saves.series


def files(series: CheckpointSeries) -> list[Path]:
    found = sorted(path for path in series.root.rglob("*") if path.is_file())
    assert len(found) >= 3 * 4
    return found


def restored(series: CheckpointSeries) -> Kept:
    store = Kept()
    load_tables(series.chain(3), [store])
    return store


def refused(series: CheckpointSeries, path: Path) -> bool:
    """Returns whether a file is reported as damaged; if not, the tables must be right."""
    try:
        assert restored(series).content() == after(3).content()
    except CheckpointError as error:
        caught = error
    else:
        return False
    assert next(part for part in path.parts if part.startswith("step-")) in str(caught)
    assert "hint" in caught.__notes__[0]
    return True


def test_a_file_that_is_gone_or_shorter_is_found(series: CheckpointSeries) -> None:
    for path in files(series):
        whole = path.read_bytes()
        path.unlink()
        assert refused(series, path), path
        for size in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:size])
            assert refused(series, path), path
        path.write_bytes(whole)
    assert restored(series).content() == after(3).content()


def test_a_flipped_bit_is_never_read_as_a_row(series: CheckpointSeries) -> None:
    generator = np.random.default_rng(0)
    found = 0
    for path in files(series):
        whole = path.read_bytes()
        for at in generator.integers(0, len(whole), 8):
            broken = bytearray(whole)
            broken[at] ^= 1 << int(generator.integers(8))
            path.write_bytes(broken)
            found += refused(series, path)
        path.write_bytes(whole)
    assert found > 60


def test_a_damaged_save_is_passed_over_for_an_older_one(series: CheckpointSeries) -> None:
    found = [path for path in files(series) if series.path(2) in path.parents]
    largest = max(found, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[::-1])
    store = Kept()
    with pytest.warns(UserWarning, match="the checkpoint of step . is passed over") as warned:
        assert TableSeries(series, [store]).restore() == 1
    assert len(warned) == 2
    assert store.content() == after(1).content()


def test_a_later_step_is_no_older_save(series: CheckpointSeries) -> None:
    path = series.path(2) / "checkpoint.json"
    content = json.loads(path.read_text())["content"]
    content["after"] = {"step": 2, "sha256": open_checkpoint(series.path(2)).sha256}
    write_sealed(path, content)
    with pytest.raises(CheckpointError, match="is not the checkpoint whose changes"):
        series.chain(2)


@pytest.mark.parametrize("link", [3, {"step": 1}, {"step": -1, "sha256": "0" * 64}, []])
def test_a_link_that_is_none_is_refused(series: CheckpointSeries, link: object) -> None:
    path = series.path(2) / "checkpoint.json"
    content = json.loads(path.read_text())["content"]
    write_sealed(path, content | {"after": link})
    with pytest.raises(CheckpointError, match="is damaged"):
        series.chain(2)


ABOUT = "table/users/about"
SPAN = "table/users/0-1024/"


def _without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda arrays: arrays.pop(name)


def _other(name: str, array: np.ndarray) -> Callable[[dict[str, Any]], object]:
    return lambda arrays: arrays.update({name: array})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without(ABOUT), "no `table/users/about`"),
        (_other(ABOUT, np.frombuffer(b"{", np.uint8)), "cannot be read"),
        (_other(ABOUT, np.frombuffer(b'{"spec": "{}"}', np.uint8)), "no table is described"),
        (_without(SPAN + "index"), "no `table/users/0-1024/index`"),
        (_without(SPAN + "keys"), "cannot be read from .*: 'keys'"),
        (_without(SPAN + "counts"), "cannot be read from .*: 'counts'"),
        (
            _other(SPAN + "index", np.array([[0, 10, 0, 0]], np.int32)),
            "fewer or more rows than its index",
        ),
        (_other(SPAN + "index", np.array([[0, 60, 28, 0]], np.int32)), "0 to 1023 are of others"),
        (_other(SPAN + "index", np.zeros(4, np.int32)), "cannot be read"),
        (_other("table/users/9-12/index", np.zeros((0, 4), np.int32)), "bucket 9 is there twice"),
    ],
)
def test_arrays_that_make_no_table_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    """As forged with knowledge of a checkpoint's seal."""
    series = CheckpointSeries(tmp_path)
    save_tables(series, [after(1)], step=1)
    found = open_checkpoint(series.path(1))
    arrays = {name: found.read(name) for name in found.names()}
    change(arrays)
    save_arrays(series.path(1), arrays, step=1)
    with pytest.raises(CheckpointError, match=message) as caught:
        list(saved_tables(series.chain(1))["users"].batches(range(500)))
    assert str(series.path(1)) in str(caught.value) + "".join(caught.value.__notes__)
