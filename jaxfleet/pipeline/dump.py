"""Dumps of a pipeline run: numbered files in a folder, one for each pass that changed something.

::

    index.txt                   one line per pass: changed or not, operators, seconds, ops it made
    00_input.txt                the program, folded to its communication, with source lines
    01_grad_allreduce.txt       the same after the pass, with the operators it made
    01_grad_allreduce.diff      the changes, as a unified diff of the full texts
    full/00_input.txt           the full program, which can be parsed again
    full/01_grad_allreduce.txt
    sources.json                the user's lines with those around them, if their files are known
    frames.json                 the calls of the user's functions that lead to every operator
    step.json                   what a step decided, if the pipeline was a step's
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxfleet.errors import TextError
from jaxfleet.ir.call_frames import NO_FRAME, FrameTable
from jaxfleet.ir.source_excerpts import excerpts
from jaxfleet.pipeline.instruments import Stage, index_table

INDEX = "index.txt"
FACTS = "step.json"
SOURCES = "sources.json"
FRAMES = "frames.json"
_FULL = "full"
_FIRST = "00_input"  # identifies the first line of our index
_LABEL = re.compile(r"^\d+_\w+", re.MULTILINE)


class Dump:
    """Writes each stage as soon as it completes, so that a failing pipeline leaves its trace.

    Files of an earlier dump in the same folder are removed first.

    Args:
        folder: the folder to write to; created if missing.
        source: add source lines to the diffs; all other texts have them.
    """

    def __init__(self, folder: Path | str, *, source: bool = False) -> None:
        self.folder = Path(folder)
        self.source = source
        self._stages: list[Stage] = []
        self._frames = FrameTable()
        self._callers: dict[str, list[int]] = {}  # by stage, the row of every operator's calls

    def __call__(self, stage: Stage) -> None:
        if stage.pass_ is None:
            self._stages.clear()
            self._callers.clear()
            _remove_dump(self.folder)
        self._stages.append(stage)
        if stage.pass_ is None or stage.changed:
            self._write(f"{stage.label}.txt", stage.text)
            self._write(f"{_FULL}/{stage.label}.txt", stage.full_text)
            self._write_frames(stage)
        if stage.pass_ is None and (sources := excerpts(stage.after)):
            self._write(SOURCES, json.dumps(sources))
        if stage.changed:
            self._write(f"{stage.label}.diff", stage.diff_text(source=self.source))
        self._write(INDEX, index_table(self._stages))

    def _write_frames(self, stage: Stage) -> None:
        numbers = self._frames.numbers(stage.after)
        if any(number != NO_FRAME for number in numbers):
            self._callers[stage.label] = numbers
            data = {"frames": self._frames.rows, "stages": self._callers}
            self._write(FRAMES, json.dumps(data, separators=(",", ":")))

    def _write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def new_dump_folder(root: Path | str, name: str) -> Path:
    """Creates a folder for another pipeline's dump: `root/name`, or `root/name~1` if that exists.

    Several pipelines, of several processes, write under one root if the environment names it.
    """
    safe = re.sub(r"[^\w.@~+-]", "_", name)
    folder, count = Path(root) / safe, 0
    while True:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:  # taken by another pipeline
            count += 1
            folder = Path(root) / f"{safe}~{count}"
        else:
            return folder


def dump_folders(root: Path | str) -> list[Path]:
    """Returns the folders that contain a dump, in order of time: the root and its subfolders."""
    root = Path(root)
    folders = [root, *root.iterdir()] if root.is_dir() else []
    found = [folder for folder in folders if _labels(folder)]
    return sorted(found, key=lambda folder: ((folder / INDEX).stat().st_mtime_ns, folder.name))


def remove_dumps(root: Path | str) -> None:
    """Removes the dumps in a folder and its direct subfolders, and no other files."""
    for folder in dump_folders(root):
        _remove_dump(folder)
        if folder != Path(root) and not any(folder.iterdir()):
            folder.rmdir()


def write_facts(folder: Path | str, facts: Mapping[str, Any]) -> None:
    """Adds to a dump what a step decided, as data of JSON."""
    (Path(folder) / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def read_beside(folder: Path | str, name: str) -> dict[str, Any]:
    """Returns the data of `FACTS`, `SOURCES` or `FRAMES` in a dump; empty if it has none.

    Raises:
        TextError: the file is no JSON.
    """
    path = Path(folder) / name
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        what = f"{path} cannot be read: {error}"
        raise TextError(what, hint="remove it; the programs are readable without it") from error
    return found if isinstance(found, dict) else {}


def read_index(folder: Path | str) -> str:
    """Returns the text of a dump's index."""
    return (Path(folder) / INDEX).read_text(encoding="utf-8")


def _remove_dump(folder: Path) -> None:
    """Removes only the files listed in the index of an earlier dump."""
    labels = _labels(folder)
    for label in labels:
        for name in (f"{label}.txt", f"{label}.diff", f"{_FULL}/{label}.txt"):
            (folder / name).unlink(missing_ok=True)
    if labels:
        (folder / INDEX).unlink()
        for name in (FACTS, SOURCES, FRAMES):
            (folder / name).unlink(missing_ok=True)
    full = folder / _FULL
    if labels and full.is_dir() and not any(full.iterdir()):
        full.rmdir()


def _labels(folder: Path) -> list[str]:
    """Returns the labels listed in the index; none without an index of ours."""
    index = folder / INDEX
    if not index.is_file():
        return []
    labels = _LABEL.findall(read_index(folder))
    return labels if labels[:1] == [_FIRST] else []
