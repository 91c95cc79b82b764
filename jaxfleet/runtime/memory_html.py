"""HTML of memory reports and of plans for a budget, for notebooks."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jaxfleet.analysis.memory import MemoryProfile
from jaxfleet.analysis.memory.profile import size_text
from jaxfleet.notebook import Markup, element, head, shown, table

if TYPE_CHECKING:
    from jaxfleet.runtime.memory_fit import Fit
    from jaxfleet.runtime.memory_report import MemoryReport

_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 180, 64, 16  # of the curve's drawing, in pixels
_VALUES = 12  # of the peak, that are listed
_POINTS = 240  # of a curve: more than one in three pixels shows nothing new


def report_html(report: "MemoryReport") -> str:
    """Returns the representation of a memory report."""
    program = report.after.program
    saved = report.fit is not None and bool(report.fit.passes)
    parts = [head("MemoryReport", program.name, "besides its state, batch and results")]
    parts.append(table(_totals(report)))
    parts.append(_curves(report))
    if report.after.bytes:
        at, op = report.after.peak_at, program.root.ops[report.after.peak_at]
        count = f"{at:,} of {len(program.root.ops):,}"
        where = f"largest values at the peak, operator {count}, {op.type} ({op.role.value})"
        parts.append(element("div", f"{where}{', as run' if saved else ''}:"))
        parts.append(_largest(report.after))
    return shown(*parts)


def fit_html(fit: "Fit") -> str:
    """Returns the representation of a plan for a budget."""
    rows = [
        ("budget", size_text(fit.budget)),
        ("as it is", f"{size_text(fit.before)} by xla"),
    ]
    if fit.after is not None:
        rows.append(("as planned", f"{size_text(fit.after.bytes)} by xla"))
        if fit.after.host_bytes:
            rows.append(("on the host", size_text(fit.after.host_bytes)))
    rows.append(("chosen", fit.note))
    rows.append(("passes", ", ".join(each.name for each in fit.passes) or "none"))
    return shown(head("Fit", fit.original.name, "a plan for a memory budget"), table(rows))


def _totals(report: "MemoryReport") -> Iterator[tuple[str, str]]:
    if report.fit is not None:
        yield "budget", f"{size_text(report.fit.budget)}: {report.fit.note}"
    yield "as it is", f"{size_text(report.before_bytes)} by xla; {_counted(report.before)}"
    if report.fit is not None and report.fit.passes:
        share = report.after_bytes / max(1, report.before_bytes)
        count, distinct = report.executables
        parts = f"{count} executables, {distinct} of them compiled"
        yield "as run", f"{size_text(report.after_bytes)} by xla, {share:.2f} of it; {parts}"
    if report.host_bytes:
        same = "" if report.host_is_apart else "; of a CPU, that is the same memory"
        yield "on the host", f"{size_text(report.host_bytes)} more in its pinned memory{same}"


def _counted(profile: MemoryProfile) -> str:
    return f"{size_text(profile.peak)} before operators are merged"


def _largest(profile: MemoryProfile) -> Markup:
    alive = profile.alive(profile.peak_at)
    rows: list[tuple[str, str, str]] = [
        (
            size_text(value.bytes),
            element("code", str(profile.program.lookup(value.name))),
            profile.program.root.ops[value.made].source.place(),
        )
        for value in alive[:_VALUES]
    ]
    if more := alive[_VALUES:]:
        rest = size_text(sum(value.bytes for value in more))
        rows.append((rest, f"{len(more):,} more values", ""))
    return table(rows, heads=("size", "value", "made at"), right=(0,))


def _curves(report: "MemoryReport") -> Markup:
    """Draws the bytes over the step's operators; lines differ by dashes too."""
    budget = report.fit.budget if report.fit is not None else 0
    most = max(report.before.peak, report.after.peak, budget, 1)
    both = report.after is not report.before
    width, bottom = _WIDTH - 8, _TOP + _HEIGHT
    parts = [
        _stroke(f"M{_LEFT},{_TOP}V{bottom}H{width}", "var(--line)", width="1"),
        _label(_LEFT - 6, _TOP + 4, size_text(most), "end"),
        _label(_LEFT - 6, bottom, "0", "end"),
        _label((_LEFT + width) // 2, bottom + 16, "operators of the step, in order", "middle"),
        _stroke(_path(report.before.bytes, most), "var(--two)" if both else "var(--one)",
                dash="5 3" if both else ""),
    ]  # fmt: skip
    if both:
        parts.append(_stroke(_path(report.after.bytes, most), "var(--one)"))
    if budget:
        level = bottom - _HEIGHT * budget / most
        parts.append(_stroke(f"M{_LEFT},{level:.1f}H{width}", "currentColor", dash="1 4"))
    legend = [("as run" if both else "as it is", "var(--one)", "")]
    if both:
        legend.insert(0, ("as it is", "var(--two)", "5 3"))
    if budget:
        legend.append(("budget", "currentColor", "1 4"))
    for place, (name, color, dash) in enumerate(legend):
        left = _LEFT + 12 + 90 * place
        parts.append(_stroke(f"M{left},8h26", color, dash=dash))
        parts.append(_label(left + 32, 12, name, "start"))
    name = f"bytes alive over the operators of {report.after.program.name}"
    box = f"0 0 {_WIDTH} {bottom + 22}"
    size = {"width": str(_WIDTH), "viewBox": box}
    return element("svg", element("title", name), *parts, role="img", **size)


def _path(sizes: Sequence[int], most: int) -> str:
    """Returns the steps of a curve, with the largest of neighbours that share a place."""
    each = max(1, -(-len(sizes) // _POINTS))
    tops = [max(sizes[at : at + each]) for at in range(0, len(sizes), each)] or [0]
    wide = (_WIDTH - 8 - _LEFT) / len(tops)
    steps = [f"{_TOP + _HEIGHT - _HEIGHT * top / most:.1f}" for top in tops]
    rest = "".join(f"V{y}H{_LEFT + wide * (at + 1):.1f}" for at, y in enumerate(steps))
    return f"M{_LEFT},{steps[0]}{rest}"


def _stroke(path: str, color: str, *, dash: str = "", width: str = "2") -> Markup:
    style = f"fill:none;stroke:{color};stroke-width:{width};stroke-dasharray:{dash or 'none'}"
    return element("path", d=path, style=style)


def _label(x: float, y: float, text: str, anchor: str) -> Markup:
    return element("text", text, x=f"{x:.0f}", y=f"{y:.0f}", text_anchor=anchor)
