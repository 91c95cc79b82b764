"""The way of each parameter through a step: use, gradient, slices, servers, update and back."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jaxfleet.analysis.optimizer_groups import OptimizerGroup, OptimizerGroups
from jaxfleet.analysis.placement.sliced_layout import Slice, placement_of, slices_of
from jaxfleet.ir import Kind, Operator, Program, Variable, grad_name
from jaxfleet.pipeline import communicates
from jaxfleet.report.facts import UNUSUAL, size_or_none
from jaxfleet.report.history import History
from jaxfleet.report.lineage import Lineage
from jaxfleet.report.model import NONE, Journey, JourneyStep

_MOST_USES = 3  # operators of forward that read a parameter, shown
_MOST_UPDATES = 24  # operators of its optimizer, shown

OpLine = tuple[int, Operator]  # its line, and the operator


@dataclass
class _Index:
    """Where the operators of a program name each variable."""

    reads: dict[str, list[OpLine]] = field(default_factory=dict)
    writes: dict[str, list[OpLine]] = field(default_factory=dict)
    pairs: dict[str, list[OpLine]] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, places: Mapping[tuple[int, int], int]) -> "_Index":
        found = cls()
        for (block, place), line in sorted(places.items()):
            op = program.blocks[block].ops[place]
            for table, names in (
                (found.reads, op.reads),
                (found.writes, op.writes),
                (found.pairs, [param for param, _ in op.role_var]),
            ):
                for name in dict.fromkeys(names):
                    table.setdefault(name, []).append((line, op))
        return found


@dataclass(frozen=True)
class ServerProgram:
    """A server's program in the report.

    Attributes:
        number: the number of the program.
        endpoint: the server's.
        writes: the last operator that writes each of its variables, and the block.
    """

    number: int
    endpoint: str
    writes: Mapping[str, tuple[int, int]]


def server_program(number: int, endpoint: str, history: History, lineage: Lineage) -> ServerProgram:
    """Returns what journeys need of a server's program."""
    found = {}
    for (block, place), line in sorted(lineage.places[-1].items()):
        op = history.last.blocks[block].ops[place]
        found.update(dict.fromkeys(op.writes, (line, block)))
    return ServerProgram(number, endpoint, found)


def journeys_of(
    history: History,
    lineage: Lineage,
    groups: OptimizerGroups | None,
    servers: Sequence[ServerProgram] = (),
) -> tuple[Journey, ...]:
    """Returns the journey of every parameter of the program before all passes."""
    return tuple(_Journeys(history, lineage, groups, servers).run())


class _Journeys:
    def __init__(
        self,
        history: History,
        lineage: Lineage,
        groups: OptimizerGroups | None,
        servers: Sequence[ServerProgram],
    ) -> None:
        self.history, self.lineage = history, lineage
        self.servers = {server.endpoint: server for server in servers}
        self.groups = {g.name: g for g in groups.groups} if groups is not None else {}
        first, last = history.stages[0].program, history.last
        self.source = first
        self.before = _Index.of(first, lineage.places[0])
        self.after = _Index.of(last, lineage.places[-1])
        self.slices = _slices(history)

    def run(self) -> Iterator[Journey]:
        for param in self.source.of_kind(Kind.PARAM):
            group = self.groups.get(param.name)
            state = group.state if group is not None else ()
            sizes = [size_or_none(self.source.variables[name], {}) for name in state]
            yield Journey(
                self.lineage.variable(param),
                sum(size for size in sizes if size != NONE),
                tuple(state),
                tuple(self._steps(param, group)),
            )

    def _steps(self, param: Variable, group: OptimizerGroup | None) -> Iterator[JourneyStep]:
        name = param.name
        uses = [x for x in self.before.reads.get(name, ()) if x[1].role.is_forward]
        for line, _ in uses[:_MOST_USES]:
            yield JourneyStep("use", line)
        if len(uses) > _MOST_USES:
            yield JourneyStep("use", NONE, f"and {len(uses) - _MOST_USES} more operators")
        gradients = group.gradients if group is not None else (grad_name(name),)
        for gradient in gradients:
            for line, _ in self.before.writes.get(gradient, ())[-1:]:
                yield JourneyStep("gradient", line)
        yield from self._travel(name)
        yield from self._update(name, group)
        yield from self._return(name)

    def _travel(self, name: str) -> Iterator[JourneyStep]:
        for line, op in self.after.pairs.get(name, ()):
            if communicates(op) and op.type not in {"send", "recv"}:
                yield JourneyStep("reduce", line)
        for part, endpoint in self.slices.get(name, ()):
            rows = "all rows" if part.is_whole else f"rows {part.start} to {_end(part)}"
            server = self.servers.get(endpoint)
            block = f"{part.name}: {rows}, held by {endpoint}"
            yield JourneyStep("slice", NONE, block, server.number if server else NONE)
        for line, op in self.after.pairs.get(name, ()):
            if op.type == "send":
                at = sorted({end for _, end in self.slices.get(name, ())})
                yield JourneyStep("send", line, f"to {', '.join(at)}" if at else "")

    def _update(self, name: str, group: OptimizerGroup | None) -> Iterator[JourneyStep]:
        found = False
        for part, endpoint in self.slices.get(name, ()):
            server = self.servers.get(endpoint)
            if server is not None and part.name in server.writes:
                line, block = server.writes[part.name]
                yield JourneyStep("update", line, f"in block {block} of {endpoint}", server.number)
                found = True
        if found:
            return
        if group is not None and group.ops:
            places = self.lineage.places[0]
            for line in [places[0, place] for place in group.ops][-_MOST_UPDATES:]:
                yield JourneyStep("update", line)
            return
        for line, _ in self.before.writes.get(name, ()):
            yield JourneyStep("update", line)

    def _return(self, name: str) -> Iterator[JourneyStep]:
        parts = [part.name for part, _ in self.slices.get(name, ())]
        seen: set[int] = set()
        for each in dict.fromkeys([*parts, name]):
            for line, op in self.after.writes.get(each, ()):
                if line not in seen and (op.type in {"recv", "concat"} or communicates(op)):
                    seen.add(line)
                    what = "join" if op.type == "concat" else "receive"
                    yield JourneyStep(what, line)


def _end(part: Slice) -> int:
    return part.start + (part.rows or 1) - 1


def _slices(history: History) -> dict[str, list[tuple[Slice, str]]]:
    """Returns the slices of each parameter with their servers; empty without servers."""
    placed = next((s.program for s in history.stages if "placement" in s.program.attrs), None)
    if placed is None:
        return {}
    found: dict[str, list[tuple[Slice, str]]] = {}
    try:
        endpoints = placement_of(placed)
        for part in slices_of(placed):
            found.setdefault(part.param, []).append((part, endpoints[part.name]))
    except UNUSUAL:  # a text that was edited by hand
        return {}
    return found
