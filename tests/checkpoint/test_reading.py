"""Checkpoints are read back, whole or by rows, from any number of parts."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from jaxfleet.checkpoint import (
    PartReceipt,
    Piece,
    commit,
    open_checkpoint,
    save_arrays,
    write_part,
)
from jaxfleet.checkpoint.manifest import BLOCK_BYTES, DTYPES
from jaxfleet.errors import CheckpointError


def numbers(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Returns an array of random bits, True or False for booleans."""
    kind = DTYPES[dtype]
    generator = np.random.default_rng(seed)
    bits = generator.integers(0, 256, (*shape, kind.itemsize), np.uint8)
    if dtype == "bool":
        bits %= 2
    if dtype == "int4":
        bits %= 8
    return np.frombuffer(bits.tobytes(), kind).reshape(shape)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return (
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    )


def test_a_folder_may_be_named_by_way_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for folder in (Path("../saved"), Path.cwd() / ".." / "saved", Path("saved")):
        save_arrays(folder, {"a": numbers(3)}, step=1)
        assert same(open_checkpoint(folder).read("a"), numbers(3))
    assert (tmp_path / "saved").is_dir()


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_comes_back_bit_by_bit(tmp_path: Path, dtype: str) -> None:
    arrays = {
        "scalar": numbers(dtype=dtype),
        "rows": numbers(5, 3, dtype=dtype),
        "none": numbers(0, 3, dtype=dtype),
        "no columns": numbers(4, 0, dtype=dtype),
        "many axes": numbers(2, 1, 3, 1, 2, dtype=dtype),
        "zeros": np.zeros((3, 2), DTYPES[dtype]),
    }
    save_arrays(tmp_path / "c", arrays, step=7)
    found = open_checkpoint(tmp_path / "c")
    assert found.names() == tuple(sorted(arrays))
    for name, array in arrays.items():
        assert same(found.read(name), array), name
        assert found.shape(name) == array.shape
        assert found.dtype(name) == array.dtype
    found.verify()


def test_an_array_that_does_not_lie_in_c_order_comes_back_the_same(tmp_path: Path) -> None:
    array = numbers(6, 4)
    given = {
        "turned": array.T,
        "stepped": array[::2, ::-1],
        "big": array.astype(">f4"),
        "fortran": np.asfortranarray(array),
    }
    save_arrays(tmp_path / "c", given, step=1)
    found = open_checkpoint(tmp_path / "c")
    for name, value in given.items():
        np.testing.assert_array_equal(found.read(name), value)
    assert found.dtype("big") == np.dtype("float32")


def split(array: np.ndarray, name: str, parts: int) -> list[Piece]:
    ends = np.linspace(0, len(array), parts + 1).astype(int)
    return [Piece(name, array[a:b], int(a), array.shape) for a, b in pairwise(ends)]


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_rows_are_found_in_any_number_of_parts(tmp_path: Path, parts: int) -> None:
    array = numbers(11, 3)
    receipts = [
        write_part(tmp_path, f"server {number}", [piece], step=4, facts={"number": number})
        for number, piece in enumerate(split(array, "state/0/w1", parts))
    ]
    commit(tmp_path, receipts, step=4, facts={"job": "digits"})
    found = open_checkpoint(tmp_path)
    assert (found.step, found.facts) == (4, {"job": "digits"})
    assert found.part_facts() == {f"server {n}": {"number": n} for n in range(parts)}
    for start in range(12):
        for stop in range(start, 12):
            assert same(found.read("state/0/w1", start, stop), array[start:stop])


def test_one_process_may_hold_several_pieces_of_an_array(tmp_path: Path) -> None:
    array = numbers(10, 2)
    pieces = split(array, "w", 4)
    receipts = [
        write_part(tmp_path, "server 0", [pieces[2], pieces[0]], step=1),
        write_part(tmp_path, "server 1", [pieces[3], pieces[1]], step=1),
    ]
    commit(tmp_path, receipts, step=1)
    assert same(open_checkpoint(tmp_path).read("w"), array)


def test_an_array_of_many_blocks_is_read_by_rows(tmp_path: Path) -> None:
    rows = 3 * BLOCK_BYTES // 4096 + 5
    array = numbers(rows, 1024)
    save_arrays(tmp_path / "c", {"w": array}, step=1)
    found = open_checkpoint(tmp_path / "c")
    edge = BLOCK_BYTES // 4096
    for start, stop in [
        (0, 1),
        (edge - 1, edge + 1),
        (edge, 2 * edge),
        (rows - 1, rows),
        (0, rows),
    ]:
        assert same(found.read("w", start, stop), array[start:stop])


def test_more_than_waits_at_once_is_written_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxfleet.checkpoint.array_store.PENDING_BYTES", 1 << 20)
    monkeypatch.setattr("jaxfleet.checkpoint.manifest.BLOCK_BYTES", 1 << 18)
    arrays = {f"w{n}": numbers(n * 100 + 1, 500, seed=n) for n in range(6)}
    save_arrays(tmp_path / "c", arrays, step=1)
    found = open_checkpoint(tmp_path / "c")
    assert all(same(found.read(name), array) for name, array in arrays.items())


def test_a_generator_may_use_its_buffer_again(tmp_path: Path) -> None:
    buffer = np.zeros((4, 2), np.float32)

    def filled() -> Iterator[Piece]:
        for number in range(5):
            buffer[...] = number
            yield Piece.whole(f"w{number}", buffer)
        buffer[...] = -1

    commit(tmp_path, [write_part(tmp_path, "a", filled(), step=1)], step=1)
    found = open_checkpoint(tmp_path)
    assert [found.read(f"w{number}")[0, 0] for number in range(5)] == [0, 1, 2, 3, 4]


def test_few_files_hold_many_arrays(tmp_path: Path) -> None:
    pieces = [Piece.whole(f"state/{n}", numbers(2, 2, seed=n)) for n in range(200)]
    receipt = write_part(tmp_path, "server 0", pieces, step=1)
    assert receipt.files < 50  # for 200 arrays; tensorstore decides the exact number
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert receipt.files == len(files)
    assert receipt.bytes == sum(path.stat().st_size for path in files)


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/passwd", "a/b/../c", "", ".", "\x00", "ü/\n", "%"]
)
def test_a_name_may_be_any_text_and_names_no_file(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "in" / "c"
    receipt = write_part(folder, name or "p", [Piece.whole(name, numbers(2))], step=1)
    commit(folder, [receipt], step=1)
    assert same(open_checkpoint(folder).read(name), numbers(2))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["c"]


@pytest.mark.parametrize("place", ["a b", "ü", "a?b#c", "%41", "x" * 200, "file:", "~"])
def test_a_folder_may_have_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save_arrays(Path(place), {"w": numbers(3)}, step=1)
    assert same(open_checkpoint(Path(place)).read("w"), numbers(3))
    assert same(open_checkpoint(tmp_path / place).read("w"), numbers(3))
    assert [path.name for path in tmp_path.iterdir()] == [place]


def test_a_receipt_travels_as_plain_data(tmp_path: Path) -> None:
    receipt = write_part(tmp_path, "server 0", [Piece.whole("w", numbers(2))], step=1)
    assert PartReceipt.from_plain(receipt.to_plain()) == receipt
    for key in ("part", "folder", "files", "bytes", "sha256"):
        with pytest.raises(CheckpointError, match=rf"at `\$\.{key}`"):
            PartReceipt.from_plain({**receipt.to_plain(), key: []})


def test_a_wrong_name_is_answered_with_a_near_one(tmp_path: Path) -> None:
    save_arrays(tmp_path / "c", {"state/0/w1": numbers(2)}, step=1)
    with pytest.raises(CheckpointError, match="has no `state/0/w2`") as caught:
        open_checkpoint(tmp_path / "c").read("state/0/w2")
    assert "`state/0/w1`" in caught.value.__notes__[0]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 4), (2, 1), (4, 4), (4, None)])
def test_rows_that_are_not_there_are_refused(tmp_path: Path, start: int, stop: int | None) -> None:
    save_arrays(tmp_path / "c", {"w": numbers(3)}, step=1)
    with pytest.raises(CheckpointError, match=r"has rows \[0:3\]"):
        open_checkpoint(tmp_path / "c").read("w", start, stop)


def test_a_scalar_is_one_row(tmp_path: Path) -> None:
    save_arrays(tmp_path / "c", {"count": np.int32(5)}, step=1)
    found = open_checkpoint(tmp_path / "c")
    assert found.read("count", 0, 1) == 5
    with pytest.raises(CheckpointError, match="has rows"):
        found.read("count", 0, 0)


def test_nothing_is_left_running(tmp_path: Path) -> None:
    before = threading.active_count()
    save_arrays(tmp_path / "c", {"w": numbers(3)}, step=1)
    open_checkpoint(tmp_path / "c").verify()
    assert threading.active_count() == before


def test_importing_it_does_not_import_tensorstore() -> None:
    code = "import sys, jaxfleet.checkpoint; assert 'tensorstore' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)
