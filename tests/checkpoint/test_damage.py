"""Damaged data is never read, and the error names the file."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet.checkpoint import open_checkpoint, save_arrays
from jaxfleet.checkpoint.files import write_sealed
from jaxfleet.errors import CheckpointError

W = np.arange(3000, dtype=np.float32).reshape(1000, 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_arrays(tmp_path / "c", {"w": W, "count": np.int32(3)}, step=5, facts={"x": 1})
    return tmp_path / "c"


def part_of(folder: Path) -> Path:
    return next(folder.glob("part-*"))


def refuses(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder).verify()
    assert str(folder) in str(caught.value)
    assert "hint" in caught.value.__notes__[0]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    refuses(tmp_path / "c", "there is no checkpoint")


def test_a_folder_without_its_manifest_is_no_checkpoint(folder: Path) -> None:
    (folder / "checkpoint.json").unlink()
    refuses(folder, "there is no checkpoint")


def test_a_part_that_is_gone(folder: Path) -> None:
    shutil.rmtree(part_of(folder))
    refuses(folder, r"cannot read .*part\.json: No such file")


def test_data_that_are_gone(folder: Path) -> None:
    shutil.rmtree(part_of(folder) / "data")
    refuses(folder, "have 0 bytes, and had")


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_no_file_may_be_shorter_than_it_was(folder: Path) -> None:
    for path in files(folder):
        whole = path.read_bytes()
        for size in (0, 1, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:size])
            refuses(folder, "is damaged|have .* bytes")
        path.unlink()
        refuses(folder, "there is no checkpoint|cannot read|bytes, and had")
        path.write_bytes(whole)
    open_checkpoint(folder).verify()


def test_a_flipped_bit_is_never_read_as_a_number(folder: Path) -> None:
    generator = np.random.default_rng(0)
    refused = 0
    for path in files(folder):
        whole = path.read_bytes()
        for at in generator.integers(0, len(whole), 60):
            broken = bytearray(whole)
            broken[at] ^= 1 << int(generator.integers(8))
            path.write_bytes(broken)
            refused += not reads_right_or_refuses(folder)
        path.write_bytes(whole)
    assert refused > 100


def reads_right_or_refuses(folder: Path) -> bool:
    """Returns whether a flipped bit was irrelevant: some bits of the files have no meaning."""
    try:
        found = open_checkpoint(folder)
        assert (found.step, found.facts) == (5, {"x": 1})
        np.testing.assert_array_equal(found.read("w"), W)
        assert found.read("count") == 3
    except CheckpointError:
        return False
    return True


def test_rows_beside_the_damage_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxfleet.checkpoint.manifest.BLOCK_BYTES", 1200)  # 100 rows
    save_arrays(tmp_path / "c", {"w": W}, step=1)
    path = max(files(tmp_path), key=lambda path: path.stat().st_size)
    data = path.read_bytes()
    at = data.index(W[555].tobytes())
    path.write_bytes(data[:at] + b"\x7f" + data[at + 1 :])
    found = open_checkpoint(tmp_path / "c")
    np.testing.assert_array_equal(found.read("w", 0, 500), W[:500])
    np.testing.assert_array_equal(found.read("w", 600), W[600:])
    with pytest.raises(CheckpointError, match="rows from 500 on have another checksum"):
        found.read("w", 599, 601)


def test_data_of_another_save_are_not_taken_for_these(tmp_path: Path) -> None:
    for name, sign in (("a", 1), ("b", -1)):
        save_arrays(tmp_path / name, {"w": W * sign}, step=1)
    shutil.rmtree(part_of(tmp_path / "a") / "data")
    shutil.copytree(part_of(tmp_path / "b") / "data", part_of(tmp_path / "a") / "data")
    refuses(tmp_path / "a", "another checksum|bytes, and had")


def test_a_checkpoint_of_a_newer_version_says_so(folder: Path) -> None:
    path = folder / "checkpoint.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    refuses(folder, "has version 2 of the format; this jaxfleet reads version 1")
    path.write_text('{"format": "jaxfleet checkpoint", "version": 2, "sha256": {}, "content": []}')
    refuses(folder, "has version 2 of the format; this jaxfleet reads version 1")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "nonsense",
        '{"format": "other"}',
        "[" * 100_000,
        "1" * 10_000,
        '{"format": "jaxfleet checkpoint", "version": true}',
        '{"format": "jaxfleet checkpoint", "version": 1, "content": 3, "sha256": 4}',
        '{"format": "jaxfleet checkpoint", "version": 1, "content": {"a": 1e999}, "sha256": "00"}',
        "\udcff".encode("utf-8", "surrogatepass").decode("latin-1"),
    ],
)
def test_what_is_no_manifest_is_refused(folder: Path, text: str) -> None:
    (folder / "checkpoint.json").write_bytes(text.encode("latin-1"))
    refuses(folder, "is damaged")


def test_a_manifest_that_is_too_long_is_not_read(folder: Path) -> None:
    with (folder / "checkpoint.json").open("r+b") as file:
        file.truncate(1 << 40)  # uses no space on the disk
    refuses(folder, "no manifest is so long")


def content(path: Path) -> Any:
    return json.loads(path.read_text())["content"]


def reseal(folder: Path, change: Callable[[Any, Any], object]) -> None:
    """Changes both manifests, with knowledge of their seal."""
    top, path = content(folder / "checkpoint.json"), part_of(folder) / "part.json"
    part = content(path)
    change(top, part)
    sha256 = write_sealed(path, part)
    if isinstance(top.get("parts"), list) and top["parts"] and isinstance(top["parts"][0], dict):
        top["parts"][0].setdefault("sha256", sha256)
        if len(str(top["parts"][0]["sha256"])) == 64:
            top["parts"][0]["sha256"] = sha256
    write_sealed(folder / "checkpoint.json", top)


WRONG: list[Any] = [
    None,
    True,
    -1,
    2**70,
    1.5,
    "x",
    "../../x",
    [],
    [[]],
    {},
    {"a": 1},
    [-1],
    ["x"],
    [None],
]
TOP = ["step", "facts", "parts"]
ITEM = ["part", "folder", "sha256"]
PART = ["step", "part", "facts", "data_bytes", "pieces"]
PIECE = ["name", "dtype", "shape", "start", "whole_shape", "shared", "block_rows", "sha256"]


def opens_well(folder: Path) -> bool:
    """Returns whether all can be read; any error other than the named one fails the test."""
    try:
        open_checkpoint(folder).verify()
        for name in open_checkpoint(folder).names():
            open_checkpoint(folder).read(name)
    except CheckpointError:
        return False
    return True


def harmless(key: str, value: Any) -> bool:
    return (key == "facts" and isinstance(value, dict)) or (
        (key == "name" and isinstance(value, str))
        or (key == "shared" and value is True)
        or (key == "pieces" and value == [])
        or (key == "parts" and value == [])
    )


@pytest.mark.parametrize(
    ("where", "key"),
    [
        *(("top", key) for key in TOP),
        *(("item", key) for key in ITEM),
        *(("part", key) for key in PART),
        *(("piece", key) for key in PIECE),
    ],
)
def test_a_manifest_with_wrong_fields_is_refused(folder: Path, where: str, key: str) -> None:
    old = {path: path.read_bytes() for path in files(folder)}

    def at(top: Any, part: Any) -> Any:
        return {"top": top, "item": top["parts"][0], "part": part, "piece": part["pieces"][0]}[
            where
        ]

    def put(value: Any, top: Any, part: Any) -> None:
        at(top, part)[key] = value

    for value in WRONG:
        reseal(folder, partial(put, value))
        if where == "item" and key == "sha256":
            assert not opens_well(folder)
        elif not harmless(key, value):
            assert not opens_well(folder), value
        for path, data in old.items():
            path.write_bytes(data)
    reseal(folder, lambda top, part: at(top, part).pop(key))
    if (where, key) != ("item", "sha256"):
        assert not opens_well(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": [2**40, 3], "whole_shape": [2**40, 3]}, "checksums for"),
        ({"shape": [2**61, 3], "whole_shape": [2**61, 3]}, "larger than any array"),
        (
            {"shape": [2**40, 3], "whole_shape": [2**40, 3], "block_rows": 2**41},
            "bytes, and had",
        ),
        ({"whole_shape": [2**40, 3]}, "are in no part"),
        ({"block_rows": 2**61}, "cannot be read"),
        ({"block_rows": 0}, "blocks without rows"),
        ({"dtype": "float64"}, "cannot be read|bytes, and had"),
        ({"dtype": "object"}, "dtype object"),
        ({"shape": [1] * 40, "whole_shape": [1] * 40}, "40 axes"),
        ({"shape": [1500, 2], "whole_shape": [1500, 2], "block_rows": 1500}, "cannot be read"),
        ({"shape": [], "whole_shape": [], "block_rows": 1}, "cannot be read"),
    ],
)
def test_sizes_that_cannot_be_are_refused_before_memory_is_taken(
    folder: Path, changes: Any, message: str
) -> None:
    reseal(folder, lambda _, part: part["pieces"][0].update(changes))
    refuses(folder, message)


@pytest.mark.parametrize(
    "name", ["..", "../c", "part-a-00000000/..", "/etc", "", "part-\x00-00000000"]
)
def test_a_part_cannot_be_outside_the_folder(folder: Path, name: str) -> None:
    reseal(folder, lambda top, _: top["parts"][0].update(folder=name))
    refuses(folder, "is not the folder of a part")


def test_a_part_cannot_be_listed_twice(folder: Path) -> None:
    top = content(folder / "checkpoint.json")
    top["parts"] *= 2
    write_sealed(folder / "checkpoint.json", top)
    refuses(folder, "is there twice")
