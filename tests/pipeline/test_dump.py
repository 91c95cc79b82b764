"""The dump folder."""

from pathlib import Path

import pytest

from jaxfleet.errors import VerifyError
from jaxfleet.ir import parse
from jaxfleet.pipeline import (
    Dump,
    dump_folders,
    new_dump_folder,
    parse_pipeline,
    read_index,
    remove_dumps,
    run_pipeline,
)
from tests.pipeline.toys import TOY

pytestmark = pytest.mark.usefixtures("toy_passes")


def dump(pipeline: str, folder: Path, *, source: bool = False) -> None:
    """Runs a pipeline over the toy program and dumps it."""
    run_pipeline(TOY, parse_pipeline(pipeline), instruments=[Dump(folder, source=source)])


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_only_what_a_pass_changed_is_written(tmp_path: Path) -> None:
    dump("nothing,add_copies", tmp_path / "made" / "here")
    assert files(tmp_path / "made" / "here") == [
        "00_input.txt",
        "02_add_copies.diff",
        "02_add_copies.txt",
        "full/00_input.txt",
        "full/02_add_copies.txt",
        "index.txt",
    ]


def test_the_index_has_one_line_a_pass(tmp_path: Path) -> None:
    dump("nothing,add_copies", tmp_path)
    labels = [line.split()[0] for line in read_index(tmp_path).splitlines()]
    assert labels == ["00_input", "01_nothing", "02_add_copies"]


def test_the_full_text_of_a_stage_parses_to_its_program(tmp_path: Path) -> None:
    dump("add_copies", tmp_path)
    text = (tmp_path / "full" / "01_add_copies.txt").read_text()
    assert parse(text) == run_pipeline(TOY, parse_pipeline("add_copies"))


def test_diffs_have_source_lines_on_request(tmp_path: Path) -> None:
    dump("add_copies", tmp_path / "without")
    dump("add_copies", tmp_path / "with", source=True)
    assert "by add_copies" not in (tmp_path / "without" / "01_add_copies.diff").read_text()
    assert "by add_copies" in (tmp_path / "with" / "01_add_copies.diff").read_text()


def test_a_dump_replaces_an_earlier_one_and_nothing_else(tmp_path: Path) -> None:
    dump("add_copies,add_copies", tmp_path)
    (tmp_path / "03_notes.txt").write_text("mine")
    dump("nothing", tmp_path)
    assert files(tmp_path) == ["00_input.txt", "03_notes.txt", "full/00_input.txt", "index.txt"]


def test_a_foreign_index_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "index.txt").write_text("mine\n")
    remove_dumps(tmp_path)
    assert files(tmp_path) == ["index.txt"]
    assert dump_folders(tmp_path) == []


def test_a_pipeline_that_fails_leaves_what_it_did_so_far(tmp_path: Path) -> None:
    with pytest.raises(VerifyError):
        dump("add_copies,forget,add_copies", tmp_path)
    assert "02_forget.diff" in files(tmp_path)
    assert len(read_index(tmp_path).splitlines()) == 3


def test_each_pipeline_under_one_root_gets_its_own_folder(tmp_path: Path) -> None:
    names = [new_dump_folder(tmp_path / "root", "step").name for _ in range(3)]
    assert names == ["step", "step~1", "step~2"]
    assert new_dump_folder(tmp_path / "root", "a/b c").name == "a_b_c"


def test_dumps_are_found_and_removed_under_a_root(tmp_path: Path) -> None:
    first, second = new_dump_folder(tmp_path, "step"), new_dump_folder(tmp_path, "step")
    dump("nothing", first)
    dump("add_copies", second)
    assert dump_folders(tmp_path) == [first, second]
    remove_dumps(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_root_that_does_not_exist_has_no_dumps(tmp_path: Path) -> None:
    assert dump_folders(tmp_path / "nowhere") == []
    remove_dumps(tmp_path / "nowhere")
