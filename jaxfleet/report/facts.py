"""Adds to lines what analyses find: shardings, flops, bytes, and memory over the step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from jaxfleet.analysis.memory import memory_profile
from jaxfleet.analysis.memory.costs import Costs, TemporaryBytes, bytes_of
from jaxfleet.analysis.memory.live_ranges import InnerPeaks
from jaxfleet.analysis.sharding import ShardingPlan, StateSharding, mesh_of, propagate, summed_state
from jaxfleet.analysis.sharding.layout_choices import shardable_state
from jaxfleet.errors import JaxfleetError
from jaxfleet.ir import Dim, Kind, Operator, Program, Variable, evaluate
from jaxfleet.ir.program import Block
from jaxfleet.passes.collective.local_steps import plan_apart
from jaxfleet.report.history import History
from jaxfleet.report.lineage import Lineage
from jaxfleet.report.model import NONE, MemoryCurve
from jaxfleet.report.rank_labels import rank_labels, ranks_of

# What analyses raise for programs that are no user's step: drawn ones, and texts edited by hand. A
# report shows the rest of such a program.
UNUSUAL = (JaxfleetError, ArithmeticError, AssertionError, LookupError)

_ASSUMED_ROWS = 32  # where a program has a symbolic batch and nothing records its number of rows
_ON_ONE = frozenset({"c_summand", "c_local", "c_split", "c_random_bits", "c_random_split"})
_MESSAGES = frozenset({"send", "recv", "prefetch", "push_rows"})
_WHOLE = "replicated"


def sizes_of(history: History) -> tuple[dict[str, int], bool]:
    """Returns the number of each letter on one device, and whether it is a guess."""
    letters = {
        letter
        for stage in (history.stages[0], history.stages[-1])
        for variable in _variables(stage.program)
        for size in variable.shape
        if isinstance(size, Dim)
        for letter in size.letters
    }
    if history.rows is None:
        return dict.fromkeys(sorted(letters), _ASSUMED_ROWS), bool(letters)
    program = history.last
    devices = program.attrs.get("devices", 1)
    is_cut = bool(program.attrs.get("sharded")) and isinstance(devices, int)
    rows = history.rows // int(str(devices)) if is_cut else history.rows
    return dict.fromkeys(sorted(letters), rows), False


def _variables(program: Program) -> Iterator[Variable]:
    for scope in (program.variables, *(block.variables for block in program.blocks)):
        yield from scope.values()


def size_or_none(variable: Variable, sizes: Mapping[str, int]) -> int:
    """Returns a variable's bytes; `NONE` if a size is unknown."""
    if not variable.dtype:
        return NONE
    try:
        return bytes_of(variable, sizes)
    except UNUSUAL:
        return NONE


def add_costs(lineage: Lineage, history: History, sizes: Mapping[str, int]) -> None:
    """Sets the flops and the transferred bytes of every operator, at its last stage."""
    done: set[int] = set()
    for stage, places in reversed(list(zip(history.stages, lineage.places, strict=True))):
        program = stage.program
        todo = {place: line for place, line in places.items() if line not in done}
        if not todo:
            continue
        try:
            costs = Costs(program, sizes)
        except UNUSUAL:
            return
        for (index, place), number in todo.items():
            block = program.blocks[index]
            op, line = block.ops[place], lineage.lines[number]
            try:
                line.flops = 2 * costs.products(op, block) or NONE
            except UNUSUAL:
                line.flops = NONE
            if op.type in _MESSAGES or (op.type.startswith("c_") and op.type not in _ON_ONE):
                line.moved_bytes = _moved(op, program, block, sizes)
        done.update(todo.values())


def _moved(op: Operator, program: Program, block: Block, sizes: Mapping[str, int]) -> int:
    names = op.writes if op.type in {"recv", "prefetch"} else op.reads
    try:
        found = [size_or_none(program.lookup(name, block), sizes) for name in names]
    except UNUSUAL:
        return NONE
    return sum(size for size in found if size != NONE)


def add_labels(lineage: Lineage, history: History) -> str:
    """Sets how outputs lie on the devices; returns why that is not known, or an empty string."""
    at = history.divided_at
    if at is None and ranks_of(history.last) > 1:
        return _add_rank_labels(lineage, history)
    if at is None:
        return "no pass divides the values among devices"
    if at == 0:
        return "the one-device program is not among the stages, from which shardings follow"
    name = history.stages[at].name
    if name not in {"grad_allreduce", "sharded_update", "train_apart"}:
        return f"shardings are not propagated through the pass {name}"
    try:
        held, plan = _plan(history.stages[at - 1].program, history.stages[at].program, name)
    except UNUSUAL as error:
        return f"shardings are not known: {error}"
    number = lineage.strings.number
    for (index, place), line_number in lineage.places[at - 1].items():
        block = plan.blocks.get(index)
        if block is None or place >= len(block.ops):
            continue
        found, line = block.ops[place], lineage.lines[line_number]
        line.labels = tuple(number(str(label)) for label in found.placing.outputs)
        line.completed = tuple(number(how) for how in found.completed.values())
    for (index, place), line_number in _added(lineage, at):
        program = next(
            s.program
            for s, places in zip(history.stages, lineage.places, strict=True)
            if places.get((index, place)) == line_number
        )
        line = lineage.lines[line_number]
        op = program.blocks[index].ops[place]
        if label := _label_of_collective(op):
            line.labels = (number(label),) * len(op.writes)
    final = plan.blocks[0].final
    for variable in history.stages[at].program.variables.values():
        line = lineage.lines[lineage.declarations[f"declaration {variable.name}"]]
        shown = held.label(variable.name) if variable.kind.persistable else final[variable.name]
        line.labels = (number(str(shown)),)
    return ""


def _plan(before: Program, after: Program, name: str) -> tuple[StateSharding, ShardingPlan]:
    devices = after.attrs["devices"]
    assert isinstance(devices, int)
    mesh, cut = mesh_of(before, devices)
    if name == "train_apart":
        return plan_apart(before, mesh, cut)
    held = summed_state(before)
    if name == "sharded_update":
        held = shardable_state(before, mesh, cut).held
    return held, propagate(before, mesh, sharded_inputs=cut, held=held)


def _add_rank_labels(lineage: Lineage, history: History) -> str:
    """Sets what ranks have alike in a program of one of fluid's transpilers."""
    program, places = history.last, lineage.places[-1]
    try:
        labels, state = rank_labels(program)
    except UNUSUAL as error:
        return f"what ranks have alike is not known: {error}"
    number = lineage.strings.number
    for place, found in labels.items():
        lineage.lines[places[0, place]].labels = tuple(map(number, found))
    for name, label in state.items():
        lineage.lines[lineage.declarations[f"declaration {name}"]].labels = (number(label),)
    return ""


def _added(lineage: Lineage, at: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Yields place and line of the operators that passes added from a stage on."""
    seen = set(lineage.places[at - 1].values())
    for places in lineage.places[at:]:
        for place, line in places.items():
            if line not in seen:
                seen.add(line)
                yield place, line


def _label_of_collective(op: Operator) -> str:
    if op.type.startswith(("c_allreduce", "c_allgather", "c_broadcast")) or op.type == "recv":
        return _WHOLE
    if op.type == "c_summand":
        return "partial(sum)"
    if op.type in {"c_reducescatter", "c_split"}:
        axis = op.attrs.get("axis", 0)
        return f"sharded({axis})"
    return ""


def memory_curves(
    lineage: Lineage, history: History, sizes: Mapping[str, int]
) -> tuple[MemoryCurve, ...]:
    """Returns the memory of the step as it runs, and without its budget if it has one."""
    names = [stage.name for stage in history.stages]
    found = []
    if history.fitted_by in names:
        at = names.index(history.fitted_by) - 1
        curve = _curve(lineage, history, at, sizes)
        found.append((curve, "without the budget", history.xla_bytes_before))
    title = "with the budget" if found else "as it runs"
    curve = _curve(lineage, history, len(names) - 1, sizes)
    found.append((curve, title, history.xla_bytes))
    return tuple(
        replace(curve, title=title, xla_bytes=NONE if xla is None else xla)
        for curve, title, xla in found
        if curve is not None and any(curve.bytes)
    )


def _curve(
    lineage: Lineage, history: History, stage: int, sizes: Mapping[str, int]
) -> MemoryCurve | None:
    """Returns the memory over the operators; those of a sub-block follow each other in one turn."""
    program, places = history.stages[stage].program, lineage.places[stage]
    keep = _existing(program, history.fetched)
    try:
        profile = memory_profile(program, sizes, keep=keep)
        inner = InnerPeaks(program, TemporaryBytes(program, sizes, keep=keep))
    except UNUSUAL:
        return None
    size: list[int] = []
    ops: list[int] = []
    values: list[tuple[int, int, int, int, int]] = []
    starts: list[int] = []
    for place, op in enumerate(program.root.ops):
        starts.append(len(ops))
        if not op.blocks:
            size.append(profile.bytes[place])
            ops.append(places[0, place])
            continue
        base, turn = profile.bytes[place] - inner.of(op.blocks), inner.turn(op.blocks)
        for value in turn.values:
            variable = program.blocks[value.block].variables[value.name]
            first, behind = starts[-1] + value.first, starts[-1] + value.behind
            values.append((lineage.variable(variable), value.bytes, first, behind, first))
        size += [base + alive for _, _, alive in turn.ops]
        ops += [places[block, inside] for block, inside, _ in turn.ops]
    starts.append(len(ops))
    for kept, (begin, end) in zip(profile.values, profile.spans, strict=True):
        if kept.bytes:
            variable = program.lookup(kept.name)
            made = starts[kept.made]
            values.append(
                (lineage.variable(variable), kept.bytes, starts[begin], starts[end], made)
            )
    return MemoryCurve("", size, ops, values)


def step_work(
    program: Program, sizes: Mapping[str, int], fetched: Sequence[str]
) -> tuple[int, int] | None:
    """Returns the flops and bytes of a step on one device; None if a size is unknown.

    The flops are those of products, of a loop's body in every turn. A value that XLA keeps
    (`memory_profile`) is written once and read by each of its readers, and so are parameters, state
    and data; the values of a body are written and read once in every turn.
    """
    try:
        costs, flops, moved = Costs(program, sizes), 0, 0
        for op in program.root.ops:
            flops += 2 * _products(costs, program, op, program.root, sizes)
            moved += _body_bytes(program, op, sizes)
            for name in (*op.reads, *op.writes):
                variable = program.lookup(name)
                moved += bytes_of(variable, sizes) if variable.kind is not Kind.TEMP else 0
        profile = memory_profile(program, sizes, keep=_existing(program, fetched))
    except UNUSUAL:
        return None
    return flops, moved + sum(value.bytes * (1 + len(value.reads)) for value in profile.values)


def _products(
    costs: Costs, program: Program, op: Operator, block: Block, sizes: Mapping[str, int]
) -> int:
    if not op.blocks:
        return costs.products(op, block)
    bodies = [program.blocks[index] for index in op.blocks]
    inside = [
        sum(_products(costs, program, each, body, sizes) for each in body.ops) for body in bodies
    ]
    return turns_of(op, sizes) * max(inside)


def _body_bytes(program: Program, op: Operator, sizes: Mapping[str, int]) -> int:
    found = [0]
    for index in op.blocks:
        body = program.blocks[index]
        inside = sum(_body_bytes(program, each, sizes) for each in body.ops)
        made = [body.variables[x] for each in body.ops for x in each.writes if x in body.variables]
        found.append(inside + 2 * sum(bytes_of(variable, sizes) for variable in made))
    return turns_of(op, sizes) * max(found)


def turns_of(op: Operator, sizes: Mapping[str, int]) -> int:
    """Returns how often a loop's body runs; 1 if it is not known, and of what is no loop."""
    turns = op.attrs.get("length", 1)
    return evaluate(turns, sizes) if isinstance(turns, int | Dim) else 1


def _existing(program: Program, names: Sequence[str]) -> list[str]:
    return [name for name in names if name in program.root.variables]


def heading_facts(history: History) -> list[tuple[str, str]]:
    """Returns what a program's heading and declarations say, as names with values."""
    program = history.last
    found = [("operators", f"{history.stages[0].program.op_count} -> {program.op_count}")]
    for name, kind in (("parameters", Kind.PARAM), ("other state", Kind.STATE)):
        found.append((name, str(len(program.of_kind(kind)))))
    shown = [name for name in ("devices", "trainers", "batch") if name in program.attrs]
    return [*found, *((name, str(program.attrs[name])) for name in shown)]
