"""Reads dump folders: what `jaxfleet dump` and `dump_dir` wrote, back to stages."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jaxfleet.errors import TextError
from jaxfleet.ir import Program, parse
from jaxfleet.ir.call_frames import Row, with_frames
from jaxfleet.pipeline import FACTS, FRAMES, SOURCES, dump_folders, read_beside, read_index
from jaxfleet.report.history import UNKNOWN_S, History, Measured, StageRecord, TimePart

_ROW = re.compile(r"^(?P<label>\d+_(?P<name>\w+))(?:\s.*? (?P<seconds>[\d.]+) s\b)?", re.MULTILINE)
_FULL = "full"
_T = TypeVar("_T")
_WHY_UNMEASURED = (
    "A dump is written before its step runs. jaxfleet view SCRIPT --measure 10 times ten steps, and"
    " so does JAXFLEET_DUMP_MEASURE=10 where a script dumps."
)


def read_folders(root: Path | str) -> list[History]:
    """Returns the pipelines of a dump folder and its subfolders, in order of time.

    Equal ones are read once: each trainer of a job dumps the programs of all servers.

    Raises:
        TextError: there is no dump, or a program in it cannot be read.
    """
    folders = dump_folders(root)
    if not folders:
        hint = "jaxfleet dump SCRIPT writes one; JAXFLEET_DUMP_DIR and dump_dir= do too"
        raise TextError(f"{root} contains no dump", hint=hint)
    found: dict[tuple[str, ...], History] = {}
    for folder in folders:
        key = _contents(folder)
        if key not in found:
            found[key] = _read(folder, Path(root))
    return list(found.values())


def _contents(folder: Path) -> tuple[str, ...]:
    """Returns the texts of a dump, which identify it whatever its passes' times were."""
    return tuple(path.read_text(encoding="utf-8") for path in sorted((folder / _FULL).iterdir()))


def _read(folder: Path, root: Path) -> History:
    facts = read_beside(folder, FACTS)
    label = folder.name if folder != root else folder.resolve().name
    return History(
        label,
        tuple(_stages(folder, _texts(facts.get("passes")))),
        decisions=_texts(facts.get("decisions")),
        notes=_texts(facts.get("notes")),
        facts=_pairs(facts.get("facts")),
        rows=_number(facts.get("rows")),
        fetched=_texts(facts.get("fetched")),
        budget_bytes=_number(facts.get("budget_bytes")),
        fitted_by=str(facts.get("fitted_by", "")),
        sources=_read_as(_sources, folder, SOURCES),
        measured=_measured(facts.get("measured")),
        why_unmeasured=_WHY_UNMEASURED,
        xla_bytes=_number(facts.get("xla_bytes")),
        xla_bytes_before=_number(facts.get("xla_bytes_before")),
    )


def _stages(folder: Path, options: Sequence[str]) -> Iterator[StageRecord]:
    program: Program | None = None
    frames, numbers = _read_as(_frames, folder, FRAMES)
    for place, row in enumerate(_ROW.finditer(read_index(folder))):
        path = folder / _FULL / f"{row['label']}.txt"
        if path.is_file():  # otherwise the pass changed nothing
            program = with_frames(_parsed(path), frames, numbers.get(row["label"], ()))
        if program is None:
            raise TextError(f"{path} is missing, the input of a pipeline")
        seconds = float(row["seconds"]) if row["seconds"] else UNKNOWN_S
        text = options[place - 1] if 0 < place <= len(options) else ""
        yield StageRecord(row["name"], program, text, seconds)


def _parsed(path: Path) -> Program:
    try:
        return parse(path.read_text(encoding="utf-8"))
    except TextError as error:
        error.add_note(f"  in {path}")
        raise


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _pairs(value: Any) -> list[tuple[str, str]]:
    pairs = value if isinstance(value, list) else ()
    return [(str(x[0]), str(x[1])) for x in pairs if isinstance(x, list) and len(x) == 2]


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _measured(found: Any) -> Measured | None:
    """Returns the times in a dump; None without any, or if they are not ours."""
    try:
        parts = tuple(TimePart(**part) for part in found.get("parts", ()))
        return Measured(**{**found, "parts": parts})
    except (AttributeError, TypeError):
        return None


def _read_as(convert: Callable[[Mapping[str, Any]], _T], folder: Path, name: str) -> _T:
    """Returns the data of a file beside a dump in the form that `convert` gives it."""
    found = read_beside(folder, name)
    try:
        return convert(found)
    except (AttributeError, TypeError, ValueError) as error:
        what = f"{folder / name} is not what a dump contains: {error}"
        raise TextError(what, hint="remove it; the programs are readable without it") from error


def _frames(found: Mapping[str, Any]) -> tuple[list[Row], dict[str, list[int]]]:
    rows = [
        (str(file), int(line), str(function), int(caller))
        for file, line, function, caller in found.get("frames", ())
    ]
    stages = found.get("stages", {}).items()
    return rows, {str(label): [int(number) for number in numbers] for label, numbers in stages}


def _sources(found: Mapping[str, Any]) -> dict[str, dict[int, str]]:
    return {
        path: {int(number): str(text) for number, text in lines.items()}
        for path, lines in found.items()
    }
