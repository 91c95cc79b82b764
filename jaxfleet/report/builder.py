"""Builds a report from the histories of its programs."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from jaxfleet.analysis.optimizer_groups import OptimizerGroups, find_optimizer_groups
from jaxfleet.errors import VerifyError
from jaxfleet.ir import Program, verify
from jaxfleet.ir.source_excerpts import excerpts
from jaxfleet.report.collective_traffic import device_links
from jaxfleet.report.facts import (
    UNUSUAL,
    add_costs,
    add_labels,
    heading_facts,
    memory_curves,
    size_or_none,
    sizes_of,
    step_work,
)
from jaxfleet.report.history import History
from jaxfleet.report.journeys import ServerProgram, journeys_of, server_program
from jaxfleet.report.lineage import Lineage, follow
from jaxfleet.report.model import (
    NONE,
    Journey,
    MemoryCurve,
    Report,
    ReportProgram,
    SourceFile,
    Strings,
    Traffic,
)
from jaxfleet.report.traffic import traffic_of


def build_report(histories: Iterable[History], *, title: str = "") -> Report:
    """Returns the report of programs, in this order except that steps and trainers come first.

    Args:
        histories: at least one.
        title: of the page; by default the first program's name.
    """
    ordered = sorted(map(_essential, histories), key=_rank)
    strings = Strings()
    lineages = [follow(history.stages, strings) for history in ordered]
    servers = [
        server_program(number, endpoint, history, lineage)
        for number, (history, lineage) in enumerate(zip(ordered, lineages, strict=True))
        if (endpoint := _endpoint(history.last))
    ]
    programs = [
        _program(history, lineage, servers)
        for history, lineage in zip(ordered, lineages, strict=True)
    ]
    return Report(title or ordered[0].last.name, _version(), programs, strings)


def _essential(history: History) -> History:
    """Returns the history of a program that is written anew without the one it was written from.

    That is a trainer's, which is in the report itself.
    """
    if _role(history.last) not in {"server", "startup"}:
        return history
    return replace(history, stages=history.stages[-1:])


_ORDER = ("step", "trainer", "server", "program", "startup")


def _rank(history: History) -> int:
    return _ORDER.index(_role(history.last))


def _role(program: Program) -> str:
    if program.name.endswith(".startup") or program.name.startswith("startup."):
        return "startup"
    if program.attrs.get("role") == "trainer":
        return "trainer"
    if _endpoint(program):
        return "server"
    return "step" if any(op.role_var for op in program.root.ops) else "program"


def _endpoint(program: Program) -> str:
    """Returns a server's endpoint; empty of any other program."""
    for op in program.root.ops:
        if op.type == "listen_and_serv":
            return str(op.attrs.get("endpoint", ""))
    return ""


def _program(history: History, lineage: Lineage, servers: Sequence[ServerProgram]) -> ReportProgram:
    sizes, assumed = sizes_of(history)
    facts, notes = [*heading_facts(history), *history.facts], list(history.notes)
    memory: tuple[MemoryCurve, ...] = ()
    journeys: tuple[Journey, ...] = ()
    traffic, role, work = Traffic(), _role(history.last), None
    if broken := _broken(history):
        notes.append(broken)
    else:
        add_costs(lineage, history, sizes)
        if unlabelled := add_labels(lineage, history):
            facts.append(("placement", unlabelled))
        memory = memory_curves(lineage, history, sizes)
        work = step_work(history.last, sizes, history.fetched)
        divides = role in {"step", "trainer"}
        groups = _groups(history.stages[0].program) if divides else None
        journeys = journeys_of(history, lineage, groups, servers) if divides else ()
        traffic = replace(traffic_of(history, groups), devices=device_links(history.last, sizes))
    number, frames = lineage.strings.number, lineage.frames()  # which may name further files
    variables = [
        (v.name, number(v.type), number(v.kind.value), size_or_none(v, sizes))
        for v in lineage.declared
    ]
    return ReportProgram(
        history.last.name,
        history.label,
        role,
        history.decisions,
        notes,
        facts,
        sizes,
        assumed,
        _files(history, lineage),
        frames,
        variables,
        lineage.lines,
        lineage.stages,
        memory,
        NONE if history.budget_bytes is None else history.budget_bytes,
        journeys,
        traffic,
        _endpoint(history.last),
        work,
        history.measured,
        history.why_unmeasured,
    )


def _broken(history: History) -> str:
    """Returns which stage is not valid, and why; empty if all are. A dump may end with such a one.

    Analyses are for valid programs: what one names may not be there.
    """
    for number, stage in enumerate(history.stages):
        if number and stage.program is history.stages[number - 1].program:
            continue
        try:
            verify(stage.program)
        except VerifyError as error:
            return f"the program after {stage.name} is not valid: {error}"
    return ""


def _groups(program: Program) -> OptimizerGroups | None:
    try:
        return find_optimizer_groups(program)
    except UNUSUAL:
        return None


def _files(history: History, lineage: Lineage) -> list[SourceFile]:
    known = history.sources or excerpts(history.stages[0].program)
    return [SourceFile(path, known.get(path, {})) for path in lineage.files]


def _version() -> str:
    try:
        return version("jaxfleet")
    except PackageNotFoundError:  # a checkout that is not installed
        return ""
