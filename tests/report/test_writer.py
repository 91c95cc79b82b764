"""Reports are written whole or not at all."""

import os
import stat
import threading
from pathlib import Path

import pytest

from jaxfleet.report import build_report, render, write_report
from jaxfleet.report import writer as writer_module
from tests.report.drawn import deep_history


def test_a_report_replaces_a_file_and_keeps_its_permissions(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")
    target.chmod(0o640)
    report = build_report([deep_history(1)])
    size = write_report(report, target)
    assert target.read_bytes() == render(report).encode()
    assert size == target.stat().st_size
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_report_that_cannot_be_completed_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "report.html"
    target.write_text("old")

    def full(_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer_module, "_mode_of", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(build_report([deep_history(1)]), target)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_what_a_link_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    real, link = tmp_path / "kept" / "real.html", tmp_path / "latest.html"
    real.write_text("old")
    link.symlink_to(real)
    write_report(build_report([deep_history(1)]), link)
    assert link.is_symlink()
    assert real.read_text().startswith("<!doctype html>")


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_report(build_report([deep_history(1)]), pipe)
    reader.join(timeout=30)
    assert read[0].startswith(b"<!doctype html>")
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_folder_that_is_missing_is_named_with_the_report(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="report cannot be written") as refused:
        write_report(build_report([deep_history(1)]), tmp_path / "no" / "x.html")
    assert refused.value.filename == str(tmp_path / "no" / "x.html")
