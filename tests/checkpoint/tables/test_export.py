"""A saved table is written for other programs."""

from pathlib import Path

import numpy as np
import pytest

from jaxfleet.checkpoint import CheckpointSeries
from jaxfleet.checkpoint.tables import SavedTable, export_arrays, export_text, save_tables
from jaxfleet.checkpoint.tables.saved_tables import saved_tables
from jaxfleet.errors import CheckpointError
from tests.checkpoint.tables.breaker import after
from tests.checkpoint.tables.kept import DIM, Kept


def table_of(store: Kept, folder: Path) -> SavedTable:
    series = CheckpointSeries(folder / "saves")
    save_tables(series, [store], step=1)
    return saved_tables(series.chain(1))["users"]


def expected(store: Kept) -> tuple[np.ndarray, np.ndarray]:
    keys = sorted(store.rows)
    return np.array(keys), np.array([store.rows[key].row for key in keys])


def test_arrays_have_the_keys_in_order(tmp_path: Path) -> None:
    store = after(2)
    table = table_of(store, tmp_path)
    assert export_arrays(table, tmp_path / "new" / "users") == len(store.rows)
    keys, rows = (np.load(tmp_path / "new" / "users" / name) for name in ("keys.npy", "rows.npy"))
    for found, wanted in ((keys, rows), expected(store)), (table.export(), expected(store)):
        np.testing.assert_array_equal(found[0], wanted[0])
        np.testing.assert_array_equal(found[1], wanted[1])
    assert (keys.dtype, rows.dtype) == (np.int64, np.float32)


def test_text_reads_back_to_the_bit(tmp_path: Path) -> None:
    store = after(2)
    assert export_text(table_of(store, tmp_path), tmp_path / "t", lines=25) == len(store.rows)
    files = sorted((tmp_path / "t").iterdir())
    texts = [path.read_text().splitlines() for path in files]
    assert [path.name for path in files] == ["00000.tsv", "00001.tsv", "00002.tsv"]
    assert [len(lines) for lines in texts[:2]] == [25, 25]
    pairs = [line.split("\t") for lines in texts for line in lines]
    read = {int(key): np.array(row.split(" "), np.float32) for key, row in pairs}
    assert read.keys() == store.rows.keys()
    for key, row in store.rows.items():
        np.testing.assert_array_equal(read[key], row.row)


def test_a_table_without_rows_is_written(tmp_path: Path) -> None:
    table = table_of(Kept(), tmp_path)
    assert export_arrays(table, str(tmp_path / "a")) == 0  # a folder is a path or a string
    assert np.load(tmp_path / "a" / "rows.npy").shape == (0, DIM)
    assert export_text(table, str(tmp_path / "t")) == 0
    assert (tmp_path / "t").is_dir()


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    table = table_of(after(1), tmp_path)
    for export in (export_arrays, export_text):
        with pytest.raises(CheckpointError, match="is there already"):
            export(table, tmp_path)


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    table = table_of(after(1), tmp_path)
    files = [path for path in (tmp_path / "saves").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[::-1])
    for export in (export_arrays, export_text):
        with pytest.raises(CheckpointError, match="cannot be read"):
            export(table, tmp_path / "e")
    assert [path.name for path in tmp_path.iterdir()] == ["saves"]
