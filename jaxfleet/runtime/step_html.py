"""HTML of steps and of their explanations, for notebooks."""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxfleet.analysis.memory.costs import bytes_of
from jaxfleet.analysis.memory.profile import size_text
from jaxfleet.capture import Captured
from jaxfleet.ir import Kind, Program, Variable
from jaxfleet.notebook import Markup, element, head, joined, shown, table

_LINES = 200  # of an explanation
_WIDEST = 1000  # characters of a line
_PROGRAMS = 8


class Explanation(str):
    """The text of `explain()`: a string that notebooks show as a list."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        first, *rest = self.splitlines() or [""]
        items = [_decision(line) for line in rest[:_LINES]]
        if more := len(rest) - _LINES:
            items += [element("li", f"\u2026 {more:,} more: print it")] if more > 0 else []
        return shown(element("div", element("b", _cut(first))), element("ul", *items))


def _decision(line: str) -> Markup:
    depth = (len(line) - len(line.lstrip()) - 2) // 2
    style = f"margin-left:{min(depth, 8)}em;list-style:{'none' if depth > 0 else 'disc'}"
    text = _cut(line.strip())
    if depth > 0:  # rows of a table, aligned by spaces
        return element("li", element("code", text, style="white-space:pre"), style=style)
    return element("li", text, style=style)


def _cut(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[:_WIDEST]} \u2026"


def step_html(
    kind: str,
    captured: Captured,
    rows: Iterable[tuple[str, str]],
    *,
    programs: Sequence[tuple[str, Program]],
    folder: object = None,
) -> str:
    """Returns the representation of a step.

    Args:
        kind: its class.
        captured: the one-device program.
        rows: what is particular to the class: names and values.
        programs: what was compiled, with a label each.
        folder: its dump, if there is one.
    """
    program = captured.program
    found = [*rows, ("state", _state(program)), *_compiled(programs)]
    found.append(("text", _where(folder)))
    return shown(head(kind, program.name), table(found))


def arguments_html(step: Any, names: Iterable[str]) -> str:
    """Returns the representation of a step of several arguments, around that of the inner step."""
    call = f"step({', '.join(names)})"
    inner = Markup(step._repr_html_())  # as notebooks call it
    return joined(inner, shown(element("div", "called as ", element("code", call))))


def _state(program: Program) -> str:
    params, rest = program.of_kind(Kind.PARAM), program.of_kind(Kind.STATE)
    leaves = "leaf" if len(rest) == 1 else "leaves"
    others = f"{len(rest):,} other {leaves} of {_size(rest)}"
    return f"{_count(len(params), 'parameter')} of {_size(params)}, {others}"


def _size(variables: Iterable[Variable]) -> str:
    return size_text(sum(bytes_of(variable, {}) for variable in variables))


def _compiled(programs: Sequence[tuple[str, Program]]) -> Iterable[tuple[str, str]]:
    for place, (label, program) in enumerate(programs[:_PROGRAMS]):
        cuts = sum(op.type == "cut" for op in program.root.ops)
        parts = f", in {cuts + 1} executables" if cuts else ""
        yield (
            "programs" if not place else "",
            f"{label}: {_count(program.op_count, 'operator')}{parts}",
        )
    if len(programs) > _PROGRAMS:
        yield "", f"{len(programs) - _PROGRAMS:,} more"


def _where(folder: object) -> Markup:
    calls = "step.program", "step.explain()", "step.dumps", "step.view(path)"
    parts: list[str] = []
    for call in calls:
        parts += [", " if parts else "", element("code", call)]
    if folder is not None:
        parts += ["; dumped to ", element("code", str(folder))]
    return joined(*parts)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
