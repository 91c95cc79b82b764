"""Explanation of the decisions about a step, in some twenty lines."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from jaxfleet.analysis.gradient_sums import reductions, trains, with_roles
from jaxfleet.analysis.sharding import mesh_of, own_state, propagate, summed_state
from jaxfleet.analysis.sharding.layout_choices import shardable_state
from jaxfleet.capture import Captured
from jaxfleet.ir import Dim, Kind, Operator, Program, Role, Variable
from jaxfleet.lower import device_count
from jaxfleet.ops.jax_adapter import numpy_dtype
from jaxfleet.pipeline import Record
from jaxfleet.runtime.devices import steps_must_not_overlap
from jaxfleet.runtime.step_html import Explanation
from jaxfleet.runtime.step_state import beside
from jaxfleet.strategy import DistributedStrategy

_MOST_NOTES = 6
_MOST_NAMES = 4
_THOUSAND = 1000
_OWN_ROWS = {"c_random_bits": "draws", "c_random_split": "keys"}


def explain(
    captured: Captured,
    strategy: DistributedStrategy,
    devices: Sequence[Any],
    program: Program,
    dumps: Record,
) -> Explanation:
    """Returns the explanation of a step."""
    lines = [
        *about_capture(captured),
        *_about_devices(captured, strategy, devices, why_undivided(program, dumps)),
        *about_parts(program),
        *_about_communication(program, strategy),
        *_about_sharding(program, strategy, dumps),
        *_about_what_is_held(program, strategy),
        *about_notes(program, dumps),
        about_passes(dumps),
    ]
    return Explanation("\n".join([lines[0], *(f"  {line}" for line in lines[1:])]))


def about_capture(captured: Captured) -> Iterator[str]:
    """Describes the capture."""
    program = captured.program
    batch = program.attrs.get("batch")
    rows = f"any number of rows ({batch})" if isinstance(batch, Dim) else f"{batch} rows"
    yield f"step '{program.name}': {program.op_count} operators, batch of {rows}"
    params = program.of_kind(Kind.PARAM)
    rest = program.of_kind(Kind.STATE)
    yield (
        f"state: {counted(len(params), 'parameter')} of {_size(params)}, "
        f"{counted(len(rest), 'other leaf', 'other leaves')} of {_size(rest)}"
    )
    yield from captured.notes


def _about_devices(
    captured: Captured, strategy: DistributedStrategy, devices: Sequence[Any], why: str | None
) -> Iterator[str]:
    """Describes the devices; `why` is the reason if every device computes the whole batch."""
    rows, count = captured.signature.rows, len(devices)
    kind = counted(count, f"{devices[0].platform} device")
    share = f", {rows // count} of {rows} rows on each" if count > 1 and why is None else ""
    yield f"runs on {kind}{share}"
    if why is not None:
        is_by_line = why not in {_NOT_OF_BATCH, _NOTHING_OF_BATCH}
        work = "computes the whole batch" if is_by_line else "does all of the work"
        yield f"every device {work}: {why}"
    call = f"jit({strategy.lowering})" if count > 1 else "jit"
    donation = "the new state reuses the memory of the old" if strategy.donate else "no donation"
    yield f"lowered to {call}; {donation}"
    if steps_must_not_overlap(devices):
        yield "each step ends before the next starts: all-reduces of XLA:CPU may deadlock otherwise"


def about_parts(program: Program) -> Iterator[str]:
    """Describes the executables of a step that is cut."""
    if cuts := sum(op.type == "cut" for op in program.root.ops):
        cut = counted(cuts, "place")
        yield f"cut at {cut} into executables that run one after another; see memory_report()"
    if moved := [op for op in program.root.ops if op.type == "to_host"]:
        values = counted(len(moved), "value")
        yield f"{values} wait in pinned memory of the host between executables"


def _about_communication(program: Program, strategy: DistributedStrategy) -> Iterator[str]:
    if device_count(program) == 1:
        yield "one device: nothing is communicated"
        return
    is_local = strategy.communication == "local_sgd"
    found = reductions(program, unmarked=not is_local)
    scattered = [x for x in found if x.op.type == "c_reducescatter" and x.of_gradients]
    reduced = [x for x in found if x.op.type.startswith("c_allreduce")]
    gradients = [x for x in reduced if x.of_gradients]
    time = "per step" if strategy.merge == 1 else f"every {strategy.merge} calls"
    sums = [value for x in gradients for value in x.summed]
    yield f"gradients: {counted(len(gradients), 'all-reduce')}, {_size(sums)} {time}"
    if scattered:
        sums = [value for x in scattered for value in x.summed]
        yield f"gradients in parts: {counted(len(sums), 'reduce-scatter')}, {_size(sums)} {time}"
    others = [x for x in reduced if not x.of_gradients]
    if is_local:
        root = [x for x in others if x.op in program.root.ops]
        yield f"parameters: {counted(len(others) - len(root), 'all-reduce')} when devices meet"
        others = root
    forward = [x for x in others if x.role.is_forward]
    yield (
        f"statistics, losses and metrics: {counted(len(forward), 'all-reduce')} in forward, "
        f"{len(others) - len(forward)} after it"
    )
    local = [op for op in _ops(program) if op.type == "c_local"]
    if strategy.local_statistics:
        yield f"local_statistics: {len(local)} sums over the batch stay on each device"
    own = [_OWN_ROWS[op.type] for op in _ops(program) if op.type in _OWN_ROWS]
    if own:
        times = counted(len(own), "time")
        yield f"random numbers: each device draws its own rows of what one would ({times})"


def about_notes(program: Program, dumps: Record) -> Iterator[str]:
    """Names the operators that run on gathered rows, with the user's line."""
    devices = device_count(program)
    if devices == 1:
        return
    source = _one_device(dumps)
    mesh, cut = mesh_of(source, devices)
    notes: dict[str, int] = {}
    for op, why in propagate(source, mesh, sharded_inputs=cut, held=summed_state(source)).notes:
        text = f"{op.source.place() or op.type}: {why}"
        notes[text] = notes.get(text, 0) + 1
    for text, count in list(notes.items())[:_MOST_NOTES]:
        yield f"gathers at {text}" + (f" ({count} operators)" if count > 1 else "")
    if len(notes) > _MOST_NOTES:
        yield f"and at {len(notes) - _MOST_NOTES} more places"


def undivided(program: Program, dumps: Record) -> str | None:
    """Returns why each device or trainer computes all of a training step, and a remedy.

    None if gradients are summed over devices, if there are none, or if loops or branches update,
    one slice after another, which is then intended.
    """
    if not any(op.role_var for op in _ops(program)):
        return None
    why = why_undivided(program, dumps)
    if why is None:
        return None
    return f"{why}. {next(text for part, text in _INSTEAD.items() if part in why)}"


def why_undivided(program: Program, dumps: Record) -> str | None:
    """Returns why each device or trainer computes all of a step, with the user's line."""
    if device_count(program) == 1:
        return None
    source, is_training = _one_device(dumps), trains(program)
    held = summed_state(source)
    # Calls that share an update sum what they accumulated, whether a device's own or the whole.
    sums_own = is_training and not held.state
    if sums_own and _sums_over_devices(program):
        return None
    mesh, cut = mesh_of(source, device_count(program))
    plan = propagate(source, mesh, sharded_inputs=cut, held=held)
    if not sums_own and plan.divides:
        return None
    notes = plan.notes
    if not notes:
        return _NOT_OF_BATCH if is_training else _NOTHING_OF_BATCH
    op, why = notes[0]
    where = " ".join(op.source.where().split())
    return f"{why} ({where or op.type})"


def _sums_over_devices(program: Program) -> bool:
    """Whether any gradient is a sum of the devices' own."""
    whole = {name for op, _ in with_roles(program) if op.type == "c_summand" for name in op.writes}
    sums = (op for op, role in with_roles(program) if _sums_gradients(op, role))
    return any(whole.isdisjoint(op.reads) for op in sums)


def _sums_gradients(op: Operator, role: Role) -> bool:
    """Whether an operator is a reduction of gradients, or of their summands."""
    reduces = op.type.startswith("c_") and op.type not in _MOVES
    return reduces and (bool(op.role_var) or not role.is_forward)


_NOT_OF_BATCH = "the gradients are not of the batch"
_NOTHING_OF_BATCH = "nothing is computed from rows of the batch"
_MOVES = frozenset({"c_allgather", "c_split", "c_alltoall", "c_summand", *_OWN_ROWS})
_MERGING = "distribute with DistributedStrategy(merge=N) and call the step for each slice"
_INSTEAD = {  # by a part of why an operator runs whole
    "the loop carries": (
        "Axis 0 of the batch is what devices share: where the loop goes over time, pass the batch "
        "with its examples first and swap the axes in the step; where it goes over slices of the "
        f"batch, let it only add up, or {_MERGING}"
    ),
    "the reshape merges": (
        "Slices of the batch are divided where a loop over them only adds up and treats every row "
        "alike (no random numbers, positions or statistics of a slice), or where the devices "
        f"divide their number; else {_MERGING}"
    ),
    "takes some rows": (
        "To add up the gradients of slices of the batch, reshape it to [slices, rows, ...] and "
        "add up in a lax.scan over axis 0, with as many slices as there are devices, or a multiple "
        f"of that, where they draw random numbers; or {_MERGING}"
    ),
    "": (
        "Pass what the step computes with as its batch, drawn outside of the step, with one row "
        "for each example; what is not of the batch, as a scalar or in the state"
    ),
}


def _about_sharding(
    program: Program, strategy: DistributedStrategy, dumps: Record
) -> Iterator[str]:
    """Describes the sharded part of the optimizer's state, and why the rest is not sharded."""
    devices = device_count(program)
    if devices == 1 or not strategy.sharded:
        return
    source = _one_device(dumps)
    mesh, cut = mesh_of(source, devices)
    found = shardable_state(source, mesh, cut)
    leaves = [source.variables[name] for name, x in found.held.state.items() if x.is_sharded]
    each = sum(map(_bytes, leaves)) / devices
    yield (
        f"sharded: {counted(len(leaves), 'leaf', 'leaves')} of {_size(leaves)} cut over {devices} "
        f"devices, {_as_size(each)} on each; the parameters' new values are gathered"
    )
    reasons: dict[str, list[str]] = {}
    for name, why in found.whole:
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        yield f"whole on every device: {', '.join(names[:_MOST_NAMES])}{more}: {why}"


def _about_what_is_held(program: Program, strategy: DistributedStrategy) -> Iterator[str]:
    """Describes per-device state and the state beside the user's."""
    if own := [program.variables[name] for name in own_state(program)]:
        yield f"each device has its own of {counted(len(own), 'leaf', 'leaves')}, {_size(own)}"
    if strategy.communication == "local_sgd" and own:
        yield f"devices train on their own and average parameters every {strategy.k_steps} steps"
    if strategy.adaptive:
        yield f"they average more often as '{strategy.adaptive}' falls"
    if strategy.outer is not None:
        yield "the mean of their changes is the gradient of an outer optimizer"
    if strategy.hierarchical:
        yield f"reduced within groups of {strategy.hierarchical} devices, across, and within again"
    if strategy.amp:
        roundings = {"jax.convert_element_type", "jax.reduce_precision"}
        halves = sum(op.type in roundings and op.source.made_by == "half_precision"
                     for op in _ops(program))  # fmt: skip
        yield f"products in {strategy.amp}: {counted(halves, 'value')} rounded to it"
    if strategy.merge > 1:
        yield f"one update every {strategy.merge} calls, from the mean of their gradients"
    if held := [program.variables[name] for name in beside(program)]:
        yield f"held beside the state: {counted(len(held), 'variable')} of {_size(held)}"


def _one_device(dumps: Record) -> Program:
    return next(stage.before for stage in dumps if "devices" in stage.after.attrs)


def about_passes(dumps: Record) -> str:
    """Lists the passes that ran, with their times."""
    parts = [
        f"{stage.name} {stage.before.op_count} -> {stage.after.op_count}"
        if stage.before.op_count != stage.after.op_count
        else stage.name
        for stage in list(dumps)[1:]
    ]
    seconds = sum(stage.seconds + stage.verify_seconds for stage in dumps)
    return f"passes (operators before -> after): {', '.join(parts)}; {seconds:.2f} s"


def _ops(program: Program) -> Iterator[Operator]:
    for block in program.blocks:
        yield from block.ops


def _bytes(variable: Variable) -> int:
    dtype = variable.dtype
    width = 8 if dtype.startswith("key<") else numpy_dtype(dtype).itemsize
    return width * prod(size for size in variable.shape if isinstance(size, int))


def _size(variables: Sequence[Variable]) -> str:
    return _as_size(float(sum(map(_bytes, variables))))


def _as_size(total: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if total < _THOUSAND:
            return f"{total:.3g} {unit}"
        total /= _THOUSAND
    return f"{total:.3g} GB"


def counted(number: int, one: str, several: str = "") -> str:
    """Returns a number with its noun: `1 server`, `2 servers`."""
    return f"{number} {one}" if number == 1 else f"{number} {several or one + 's'}"
