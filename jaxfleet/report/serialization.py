"""The compact JSON of a report, which the page reads; `docs/view.md` describes it."""

import json
from dataclasses import asdict
from typing import Any

from jaxfleet.report.model import (
    NONE,
    JourneyStep,
    Line,
    MemoryCurve,
    Report,
    ReportProgram,
    Stage,
    Version,
)

_FORMAT = 1


def report_json(report: Report) -> str:
    """Returns a report as JSON in ASCII."""
    data = {
        "format": _FORMAT,
        "title": report.title,
        "version": report.version,
        "strings": report.strings.texts,
        "programs": [_program_json(program) for program in report.programs],
    }
    return json.dumps(data, separators=(",", ":"))


def _program_json(program: ReportProgram) -> dict[str, Any]:
    return {
        "name": program.name,
        "label": program.label,
        "role": program.role,
        "decisions": list(program.decisions),
        "notes": list(program.notes),
        "facts": list(program.facts),
        "sizes": dict(program.sizes),
        "assumed": program.sizes_assumed,
        "files": [[file.path, sorted(file.lines.items())] for file in program.files],
        "frames": list(program.frames),
        "variables": list(program.variables),
        "lines": [_line_json(line) for line in program.lines],
        "stages": [_stage_json(stage) for stage in program.stages],
        "memory": [_memory_json(curve) for curve in program.memory],
        "budget": program.budget_bytes,
        "journeys": [
            [x.param, x.state_bytes, x.state, [_step_json(step) for step in x.steps]]
            for x in program.journeys
        ],
        "placed": program.traffic.placed,
        "imagined": list(program.traffic.imagined),
        "no_traffic": program.traffic.why_none,
        "links": None if program.traffic.devices is None else asdict(program.traffic.devices),
        "endpoint": program.endpoint,
        "work": program.work,
        "measured": None if program.measured is None else asdict(program.measured),
        "unmeasured": program.why_unmeasured,
    }


def _line_json(line: Line) -> list[Any]:
    """Returns a line's columns; those at the end that say nothing are left out."""
    columns = [
        _KINDS.index(line.kind),
        [_version_json(version) for version in line.versions],
        line.file,
        line.line,
        line.function,
        line.scope,
        line.maker,
        line.caller,
        line.flops,
        line.moved_bytes,
        line.labels,
        line.completed,
    ]
    while columns[-1] in (NONE, ()):
        columns.pop()
    return columns


_KINDS = ("op", "program", "block", "declaration")


def _version_json(version: Version) -> list[Any]:
    columns = [version.stage, version.role, version.type, version.outputs, version.inputs]
    if version.attrs != NONE or version.pairs:
        columns.append(version.attrs)
    if version.pairs:
        columns.append(version.pairs)
    return columns


def _stage_json(stage: Stage) -> dict[str, Any]:
    return {
        "name": stage.name,
        "options": stage.options,
        "s": round(stage.seconds, 5),
        "verify_s": round(stage.verify_seconds, 5),
        "order": stage.order,
        "moved": stage.moved,
        "counts": stage.counts,
    }


def _memory_json(curve: MemoryCurve) -> dict[str, Any]:
    return {
        "title": curve.title,
        "bytes": list(curve.bytes),
        "ops": list(curve.ops),
        "values": list(curve.values),
        "xla": curve.xla_bytes,
    }


def _step_json(step: JourneyStep) -> list[Any]:
    columns = [step.what, step.line, step.text, step.program]
    while columns[-1] in ("", NONE) and len(columns) > 2:
        columns.pop()
    return columns
