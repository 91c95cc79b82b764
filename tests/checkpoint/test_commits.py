"""Parts become a checkpoint atomically, if they contain every row once."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet.checkpoint import (
    PartReceipt,
    Piece,
    commit,
    discard,
    open_checkpoint,
    save_arrays,
    write_part,
)
from jaxfleet.checkpoint.files import make_folder
from jaxfleet.errors import CheckpointError

WHOLE = np.arange(12, dtype=np.float32).reshape(6, 2)


def rows(start: int, stop: int, *, shared: bool = False) -> Piece:
    return Piece("w", WHOLE[start:stop], start, WHOLE.shape, shared)


def test_the_names_of_new_folders_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("jaxfleet.checkpoint.files.sync", synced.append)
    make_folder(tmp_path / "a" / "b")
    assert set(synced) == {tmp_path, tmp_path / "a"}
    make_folder(tmp_path / "a" / "b")
    assert len(synced) == 2


def write(folder: Path, **parts: list[Piece]) -> list[PartReceipt]:
    return [write_part(folder, part, pieces, step=3) for part, pieces in parts.items()]


def everything(folder: Path) -> Mapping[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"a": [rows(0, 3)], "b": [rows(4, 6)]}, r"rows \[3:4\] of `w` are in no part"),
        ({"a": [rows(1, 6)]}, r"rows \[0:1\] of `w` are in no part"),
        ({"a": [rows(0, 5)]}, r"rows \[5:6\] of `w` are in no part"),
        ({"a": [rows(0, 0)]}, r"rows \[0:6\] of `w` are in no part"),
        (
            {"a": [rows(0, 4)], "b": [rows(3, 6)]},
            r"rows \[3:4\] of `w` are in part 'a' and part 'b'",
        ),
        (
            {"a": [rows(0, 6)], "b": [rows(2, 3)]},
            r"rows \[2:3\] of `w` are in part 'a' and part 'b'",
        ),
        ({"a": [rows(0, 6)], "b": [rows(0, 6)]}, "in part 'a' and part 'b', and not shared"),
        ({"a": [rows(0, 6, shared=True)], "b": [rows(0, 6)]}, "and not shared"),
        (
            {"a": [rows(0, 6)], "b": [Piece.whole("w", WHOLE[:5])]},
            r"is float32\[6, 2\] in part 'a', float32\[5, 2\] in 'b'",
        ),
        (
            {"a": [rows(0, 3)], "b": [Piece("w", WHOLE[3:].astype("int32"), 3, (6, 2))]},
            r"int32\[6, 2\] in 'b'",
        ),
    ],
)
def test_rows_must_be_there_once(tmp_path: Path, parts: Any, message: str) -> None:
    receipts = write(tmp_path, **parts)
    with pytest.raises(CheckpointError, match=message):
        commit(tmp_path, receipts, step=3)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        open_checkpoint(tmp_path)


def test_a_shared_array_is_taken_once(tmp_path: Path) -> None:
    count = Piece.whole("count", np.array(5), shared=True)
    receipts = write(tmp_path, a=[rows(0, 3), count], b=[rows(3, 6), count], c=[count])
    commit(tmp_path, receipts, step=3)
    assert open_checkpoint(tmp_path).read("count") == 5


def test_shared_arrays_with_other_bytes_are_refused(tmp_path: Path) -> None:
    one, other = (Piece.whole("count", np.array(value), shared=True) for value in (5, 6))
    with pytest.raises(CheckpointError, match="shared by part 'a' and part 'b', with other bytes"):
        commit(tmp_path, write(tmp_path, a=[one], b=[other]), step=3)


def test_pieces_without_rows_are_no_copies(tmp_path: Path) -> None:
    empty = np.zeros((0, 2), np.float32)
    receipts = write(
        tmp_path,
        a=[rows(0, 0), rows(0, 6), Piece.whole("none", empty)],
        b=[rows(6, 6), rows(0, 0), Piece.whole("none", empty)],
    )
    commit(tmp_path, receipts, step=3)
    assert open_checkpoint(tmp_path).read("none").shape == (0, 2)


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (Piece("w", WHOLE, 1, (6, 2)), r"has 6 rows, and the piece is \[1:7\]"),
        (Piece("w", WHOLE, -1, (6, 2)), r"the piece is \[-1:5\]"),
        (Piece("w", WHOLE, 0, (6, 3)), r"\(6, 2\) are no rows of \(6, 3\)"),
        (Piece("w", WHOLE, 0, (6,)), "are no rows of"),
        (Piece("w", np.array(1), 1, ()), r"the piece is \[1:2\]"),
        (Piece("w", WHOLE.astype(object), 0, (6, 2)), "dtype object, which cannot be saved"),
        (Piece("w", np.array(["a"]), 0, (1,)), "which cannot be saved"),
        (Piece("w", WHOLE, 0, (2**60, 2)), "larger than any array"),
        (Piece("w", np.zeros((1,) * 33), 0, (1,) * 33), "33 axes"),
    ],
)
def test_what_is_no_piece_is_refused(tmp_path: Path, piece: Piece, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        write_part(tmp_path / "c", "server 0", [rows(0, 6), piece], step=1)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "facts", [{"a": float("nan")}, {"a": (1, 2)}, {"a": {1: 2}}, {"a": b"x"}, {"a": np.float32(1)}]
)
def test_facts_must_be_plain(tmp_path: Path, facts: Any) -> None:
    with pytest.raises(CheckpointError, match="must be plain data"):
        save_arrays(tmp_path / "c", {"w": WHOLE}, step=1, facts=facts)
    assert not (tmp_path / "c").exists()


def test_a_negative_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a checkpoint of step -1"):
        save_arrays(tmp_path / "c", {"w": WHOLE}, step=-1)


def test_parts_of_other_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="part 'a' of step 3 is not part 'a' of step 4"):
        commit(tmp_path, write(tmp_path, a=[rows(0, 6)]), step=4)


def test_a_part_may_be_there_once(tmp_path: Path) -> None:
    receipts = write(tmp_path, a=[rows(0, 6)])
    with pytest.raises(CheckpointError, match="part 'a' is there twice"):
        commit(tmp_path, receipts * 2, step=3)


def test_a_receipt_of_another_part_is_refused(tmp_path: Path) -> None:
    (receipt,) = write(tmp_path, a=[rows(0, 6)])
    for changed, message in [
        ({"sha256": "0" * 64}, "has the checksum"),
        ({"part": "b"}, "is not part 'b'"),
        ({"folder": "../a"}, "is not the folder of part 'a'"),
        ({"folder": "part-a-00000000"}, "cannot read"),
    ]:
        other = PartReceipt.from_plain({**receipt.to_plain(), **changed})
        with pytest.raises(CheckpointError, match=message):
            commit(tmp_path, [other], step=3)


def test_saving_again_replaces_in_one_step(tmp_path: Path) -> None:
    save_arrays(tmp_path / "c", {"w": WHOLE}, step=1)
    before = everything(tmp_path)
    receipt = write_part(tmp_path / "c", "all", [Piece.whole("w", -WHOLE)], step=2)
    assert before.items() <= everything(tmp_path).items()
    assert open_checkpoint(tmp_path / "c").step == 1
    commit(tmp_path / "c", [receipt], step=2)
    found = open_checkpoint(tmp_path / "c")
    np.testing.assert_array_equal(found.read("w"), -WHOLE)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        "checkpoint.json",
        receipt.folder,
    ]


def test_a_reader_is_told_that_the_checkpoint_was_replaced(tmp_path: Path) -> None:
    save_arrays(tmp_path / "c", {"w": WHOLE}, step=1)
    found = open_checkpoint(tmp_path / "c")
    save_arrays(tmp_path / "c", {"w": WHOLE}, step=2)
    with pytest.raises(CheckpointError, match="`w` cannot be read") as caught:
        found.read("w")
    assert "open it again" in caught.value.__notes__[0]
    assert not found.parts[0].folder.exists()


def test_a_commit_removes_what_broken_saves_left(tmp_path: Path) -> None:
    write(tmp_path / "c", a=[rows(0, 6)])
    (tmp_path / "c" / "tmp-part-b-01234567").mkdir()
    save_arrays(tmp_path / "c", {"w": WHOLE}, step=1)
    assert len(list((tmp_path / "c").iterdir())) == 2


def test_parts_can_be_given_up(tmp_path: Path) -> None:
    receipts = write(tmp_path / "c", a=[rows(0, 3)], b=[rows(3, 6)])
    discard(tmp_path / "c", receipts)
    assert not (tmp_path / "c").exists()
    save_arrays(tmp_path / "c", {"w": WHOLE}, step=1)
    discard(tmp_path / "c", write(tmp_path / "c", a=[rows(0, 3)]))
    open_checkpoint(tmp_path / "c").verify()


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff"])
def test_parts_stay_where_the_list_of_parts_cannot_be_read(tmp_path: Path, damage: bytes) -> None:
    folder = tmp_path / "c"
    save_arrays(folder, {"w": WHOLE}, step=1)
    receipts = write(folder, a=[rows(0, 6)])
    manifest = (folder / "checkpoint.json").read_bytes()
    (folder / "checkpoint.json").write_bytes(damage)
    discard(folder, receipts)
    assert (folder / receipts[0].folder).is_dir()  # the list may be the one that names it
    (folder / "checkpoint.json").write_bytes(manifest)
    commit(folder, receipts, step=3)
    assert len(list(folder.iterdir())) == 2


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(CheckpointError, match=r"holds 'thesis.tex'") as caught:
        save_arrays(tmp_path, {"w": WHOLE}, step=1)
    assert "a folder of its own" in caught.value.__notes__[0]
    with pytest.raises(CheckpointError, match="cannot write"):
        save_arrays(tmp_path / "thesis.tex", {"w": WHOLE}, step=1)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_failing_generator_leaves_nothing(tmp_path: Path) -> None:
    def pieces() -> Any:
        yield rows(0, 3)
        raise KeyboardInterrupt

    save_arrays(tmp_path / "c", {"w": WHOLE}, step=1)
    before = everything(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        write_part(tmp_path / "c", "a", pieces(), step=2)
    assert everything(tmp_path) == before


def test_the_manifest_can_be_read_by_people(tmp_path: Path) -> None:
    commit(tmp_path, write(tmp_path, a=[rows(0, 6)]), step=3, facts={"job": "digits"})
    manifest = json.loads((tmp_path / "checkpoint.json").read_text())
    assert manifest["content"]["facts"] == {"job": "digits"}
    assert manifest["content"]["parts"][0]["part"] == "a"
