"""Divides the optimize section of a step into the programs that servers run.

Each is a body: its parameters and state are its own, its data comes from outside. Names are the
step's, except for a counter's value before the learning-rate block increments it, and for values
fed by trainers.
"""

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from jaxfleet.analysis.flow import OuterUses
from jaxfleet.analysis.optimizer_groups import OptimizerGroup, OptimizerGroups, cut_rows
from jaxfleet.analysis.optimizer_groups.extraction import Extracted, extract
from jaxfleet.analysis.optimizer_groups.optimize_section import SubblockDeps
from jaxfleet.errors import PassError
from jaxfleet.ir import Kind, Operands, Operator, Program, Role, Variable
from jaxfleet.ir.inline import renamed

BEFORE = ".before"  # a counter's value at the start of the step
WAY_OUT = "train with mode='collective', or keep these parameters on one device"


@dataclass(frozen=True)
class ParameterUpdate:
    """The update of one parameter."""

    group: OptimizerGroup
    # its contribution to operators across parameters, with `parts` fetched; or None
    part: Program | None
    parts: tuple[str, ...]
    rest: Program


@dataclass
class ServerSplit:
    """All programs that servers run for a step."""

    groups: OptimizerGroups  # the optimize section, sorted
    lr: Program = field(init=False)
    combine: Program | None = None  # the operators across parameters, or None
    updates: dict[str, ParameterUpdate] = field(default_factory=dict)  # by parameter
    # values other than gradients that trainers make for servers, by the trainers' names
    feeds: dict[str, Variable] = field(default_factory=dict)
    _before: set[str] = field(default_factory=set)
    # by part: the variable that it copies, and the operator of the step that writes that; or -1
    _copied: dict[str, tuple[str, int]] = field(default_factory=dict)
    _inner: SubblockDeps = field(init=False)

    def __post_init__(self) -> None:
        groups, self._inner = self.groups, SubblockDeps(self.groups.program)
        _refuse_outside(groups)
        crossing = self._extracted(groups.crossing_ops, groups.crossing_state, "combine")
        parts = self._parts_of(crossing)
        for group in groups.groups:
            self.updates[group.name] = self._update(group, parts.get(group.name, {}))
        if groups.crossing_ops:
            names = {name: part for found in parts.values() for name, part in found.items()}
            combine = self._renamed(crossing.program, crossing.sources, names)
            self.combine = self._with_before(combine, groups.crossing_state)
        lr = self._extracted(groups.lr_ops, groups.lr_state, "lr")
        self.lr = self._learning_rates(lr)

    def cut(self, param: str, rows: int | None) -> Program:
        """Returns the update of some rows of a parameter, with the letter `rows`; None for all."""
        update = self.updates[param]
        if rows is None:
            return update.rest
        if update.part is not None:
            what = f"'{param}' is cut, but all of it is read beside other parameters"
            raise PassError(what, hint="run slice_var, which keeps such a parameter whole")
        program = cut_rows(update.group)
        return self._renamed(program, update.group.sources, {}, keep=update.group.gradients)

    @property
    def server_state(self) -> frozenset[str]:
        own = {name for group in self.groups.groups for name in group.state}
        return frozenset(own | set(self.groups.crossing_state))

    def _learning_rates(self, extracted: Extracted) -> Program:
        """Returns the learning-rate block: rates that updates read, and the state behind them."""
        bodies = [body for update in self.updates.values() for body in (update.part, update.rest)]
        fed = [v.name for body in [*bodies, self.combine] if body for v in body.of_kind(Kind.DATA)]
        program = _only(extracted.program, {name.removesuffix(BEFORE) for name in fed})
        state = [name for name in self.groups.lr_state if name in program.variables]
        return self._with_before(self._renamed(program, extracted.sources, {}), state)

    def _extracted(self, places: Sequence[int], own: Sequence[str], what: str) -> Extracted:
        graph = self.groups.graph
        name = f"{graph.program.name}.{what}"
        return extract(graph, self._inner, places, own=own, name=name)

    def _parts_of(self, crossing: Extracted) -> dict[str, dict[str, str]]:
        """Returns, by parameter, its values that crossing operators read, with their names."""
        graph = self.groups.graph
        owners = {name: g.name for g in self.groups.groups for name in (*g.gradients, *g.state)}
        owners.update({group.name: group.name for group in self.groups.groups})
        made = {place: g.name for g in self.groups.groups for place in g.ops}
        found: dict[str, dict[str, str]] = {}
        for name, number in crossing.sources.items():
            value = graph.values[number]
            if value.place in made and value.name in graph.program.variables:
                part = f"{value.name}.next.part"  # of state, which is updated in place
                self._copied[part] = (value.name, value.place)
                found.setdefault(made[value.place], {})[name] = part
            elif value.place in made:
                found.setdefault(made[value.place], {})[name] = value.name
            elif value.place < 0 and value.name in owners:
                part = f"{value.name}.part"
                self._copied[part] = (value.name, -1)
                found.setdefault(owners[value.name], {})[name] = part
        return found

    def _update(self, group: OptimizerGroup, wanted: Mapping[str, str]) -> ParameterUpdate:
        program = self._renamed(group.program, group.sources, {}, keep=group.gradients)
        ops = tuple(op for op in program.root.ops if op.type != "fetch")
        program = program.with_block(program.root.with_ops(ops))
        if not wanted:
            return ParameterUpdate(group, None, (), program)
        return self._divided(group, program, wanted)

    def _divided(
        self, group: OptimizerGroup, program: Program, wanted: Mapping[str, str]
    ) -> ParameterUpdate:
        """Divides a body into the part that other servers wait for, and the rest."""
        parts = tuple(dict.fromkeys(wanted.values()))
        declared, ops = {}, list(program.root.ops)
        copied = [(*self._copied[name], name) for name in parts if name in self._copied]
        for source, place, name in sorted(copied, key=lambda copy: -copy[1]):
            declared[name] = replace(program.variables[source], name=name, kind=Kind.TEMP)
            made = Operator("assign", Operands.of(source), Operands.of(name), role=Role.OPTIMIZE)
            ops.insert(group.ops.index(place) + 1 if place >= 0 else 0, made)
        block = program.root.with_ops(ops, declare=declared.values())
        first = _first_ops(OuterUses(program), ops, parts)
        crossing = {name for place in self.groups.crossing_ops
                    for name in self.groups.program.root.ops[place].writes}  # fmt: skip
        _refuse_second_round(group, [ops[place] for place in sorted(first)], crossing)
        part = program.with_block(block.with_ops(ops[place] for place in sorted(first)))
        rest = [op for place, op in enumerate(ops) if place not in first]
        known = {name for place in first for name in ops[place].writes}
        return ParameterUpdate(
            group, part, parts, _fed(program.with_block(block.with_ops(rest)), known)
        )

    def _renamed(
        self,
        program: Program,
        sources: Mapping[str, int],
        names: Mapping[str, str],
        keep: Collection[str] = (),
    ) -> Program:
        fed = [v.name for v in program.of_kind(Kind.DATA) if v.name not in keep]
        known = {name: names.get(name) or self._name(sources[name]) for name in fed}
        return renamed(program, {old: new for old, new in known.items() if old != new})

    def _name(self, number: int) -> str:
        graph, value = self.groups.graph, self.groups.graph.values[number]
        shared = {*self.groups.lr_state, *self.groups.crossing_state}
        if value.place >= 0:
            return value.name
        if value.name in shared:
            if graph.values[graph.final[value.name]].place < 0:
                return value.name
            self._before.add(value.name)
            return f"{value.name}{BEFORE}"
        self.feeds[value.name] = graph.variable(number)
        return value.name

    def _with_before(self, program: Program, state: Sequence[str]) -> Program:
        """Returns a body that first copies state that others read before its update."""
        names = [name for name in state if name in self._before]
        block = program.root
        ops = [_assign(name, f"{name}{BEFORE}") for name in names]
        kept = [
            replace(program.variables[name], name=f"{name}{BEFORE}", kind=Kind.TEMP)
            for name in names
        ]
        return program.with_block(block.with_ops([*ops, *block.ops], declare=kept))


def _assign(source: str, target: str) -> Operator:
    return Operator("assign", Operands.of(source), Operands.of(target), role=Role.LR_SCHED)


def _refuse_outside(groups: OptimizerGroups) -> None:
    """Rejects updates outside of the optimizer, which servers would skip."""
    params = {group.name for group in groups.groups}
    for place, op in enumerate(groups.program.root.ops):
        updated = params.intersection(op.writes)
        if updated and place not in groups.graph.nodes:
            what = f"'{min(updated)}' is updated by what depends on the batch besides its gradient"
            what = f"{what}, and a later loss depends on it in the same step: servers cannot do it"
            raise PassError(what, op=op, hint=WAY_OUT)


def _refuse_second_round(
    group: OptimizerGroup, ops: Sequence[Operator], crossing: AbstractSet[str]
) -> None:
    for op in ops:
        if not crossing.isdisjoint(op.reads):
            what = (
                f"'{group.name}' adds to what crosses parameters what depends on parameters that "
                "crossed before: servers would have to exchange twice in a step"
            )
            raise PassError(what, op=op, hint=WAY_OUT)


def _fed(program: Program, made: AbstractSet[str]) -> Program:
    """Returns a body with temporaries made by another body declared as data."""
    block, uses = program.root, OuterUses(program)
    written = {name for op in block.ops for name in uses.of(op).writes}
    fed = {n: replace(v, kind=Kind.DATA) for n, v in block.variables.items() if n in made - written}
    kept = {name: v for name, v in block.variables.items() if name not in fed}
    variables = {**program.variables, **fed}
    return replace(program, variables=variables).with_block(replace(block, variables=kept))


def _first_ops(uses: OuterUses, ops: Sequence[Operator], names: Collection[str]) -> set[int]:
    """Returns the operators that names need, and those that must read state before they do."""
    found: set[int] = set()
    wanted: set[int] = set()
    while True:
        live = set(names)
        for place in reversed(range(len(ops))):
            if place in wanted or live.intersection(ops[place].writes):
                found.add(place)
                live -= set(ops[place].writes)
                live.update(uses.of(ops[place]).reads)
        late = {
            place
            for writer in found
            for place in range(writer)
            if place not in found and not uses.of(ops[place]).reads.isdisjoint(ops[writer].writes)
        }
        if not late:
            return found
        wanted |= late


def _only(program: Program, names: AbstractSet[str]) -> Program:
    """Returns the part of a program that makes names, and updates the state that it reads."""
    uses, ops = OuterUses(program), program.root.ops
    wanted = set(names)
    while True:
        live, found = set(wanted), set[int]()
        for place in reversed(range(len(ops))):
            if not live.isdisjoint(ops[place].writes):
                found.add(place)
                live.update(uses.of(ops[place]).reads)
        state = {v.name for v in program.of_kind(Kind.STATE)}
        if live & state <= wanted:
            break
        wanted |= live & state
    kept = [ops[place] for place in sorted(found)]
    used = live.union(*(uses.of(op).writes for op in kept))
    variables = {name: v for name, v in program.variables.items() if name in used}
    return replace(program, variables=variables).with_block(program.root.with_ops(kept))
