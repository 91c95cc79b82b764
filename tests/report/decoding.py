"""Decodes a report in Python as the page does, to compare it with the programs it is of."""

import json
from collections.abc import Iterator
from typing import Any

from jaxfleet.ir.naming import name_text
from jaxfleet.report import Report
from jaxfleet.report.serialization import report_json


def data_of(report: Report) -> Any:
    """Returns the report's JSON as the page reads it."""
    return json.loads(report_json(report))


def orders(program: Any) -> Iterator[list[int]]:
    """Yields the lines of each stage."""
    before: list[int] = []
    for stage in program["stages"]:
        order: list[int] = []
        for edit in stage["order"]:
            order += [edit] if isinstance(edit, int) else before[edit[0] : edit[0] + edit[1]]
        yield order
        before = order


def texts(data: Any, number: int = 0) -> list[list[str]]:
    """Returns the operators' texts of each stage of a program, without types."""
    program, strings = data["programs"][number], data["strings"]
    return [
        [_text(program, strings, line, stage) for line in order if program["lines"][line][0] == 0]
        for stage, order in enumerate(orders(program))
    ]


def _text(program: Any, strings: list[str], line: int, stage: int) -> str:
    version = [v for v in program["lines"][line][1] if v[0] <= stage][-1]
    _, _, type_, outputs, inputs, *rest = version
    left = _operands(program, strings, outputs)
    text = f"{left} = " if left else ""
    text += f"{strings[type_]}({_operands(program, strings, inputs)})"
    if rest and rest[0] != -1:
        text += f" {strings[rest[0]]}"
    if len(rest) > 1:
        names = [name_text(program["variables"][n][0]) for n in rest[1]]
        pairs = zip(names[::2], names[1::2], strict=True)
        text += f" for {', '.join(f'({p}, {g})' for p, g in pairs)}"
    return text


def _operands(program: Any, strings: list[str], operands: Any) -> str:
    def one(item: int) -> str:
        return name_text(program["variables"][item][0]) if item >= 0 else strings[~item]

    parts = []
    for item in operands:
        if isinstance(item, int):
            parts.append(one(item))
            continue
        slot, *inside = item
        found = [one(each) for each in inside]
        text = found[0] if len(found) == 1 else f"[{', '.join(found)}]"
        parts.append(f"{strings[slot]}={text}")
    return ", ".join(parts)
