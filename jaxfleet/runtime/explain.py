"""Says in some twenty lines what was decided about a step, and why."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from jaxfleet.analysis.cut_state import cut_state
from jaxfleet.analysis.labels import infer, mesh_of, own_state, summed
from jaxfleet.capture import Captured
from jaxfleet.ir import Dim, Kind, Operator, Program, Variable
from jaxfleet.lower import device_count
from jaxfleet.ops.jax_adapter import numpy_dtype
from jaxfleet.pipeline import Record
from jaxfleet.runtime.devices import steps_must_not_overlap
from jaxfleet.runtime.held_state import beside
from jaxfleet.runtime.strategy import DistributedStrategy

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
) -> str:
    """Returns the explanation of a step."""
    lines = [
        *about_capture(captured),
        *_about_devices(captured, strategy, devices),
        *about_parts(program),
        *_about_communication(program, strategy),
        *_about_sharding(program, strategy, dumps),
        *_about_what_is_held(program, strategy),
        *about_notes(program, dumps),
        about_passes(dumps),
    ]
    return "\n".join([lines[0], *(f"  {line}" for line in lines[1:])])


def about_capture(captured: Captured) -> Iterator[str]:
    """Says what was captured."""
    program = captured.program
    batch = program.attrs.get("batch")
    rows = f"any number of rows ({batch})" if isinstance(batch, Dim) else f"{batch} rows"
    yield f"step '{program.name}': {program.op_count} operators, batch of {rows}"
    params = program.of_kind(Kind.PARAM)
    rest = program.of_kind(Kind.STATE)
    yield (
        f"state: {_count(len(params), 'parameter')} of {_size(params)}, "
        f"{_count(len(rest), 'other leaf', 'other leaves')} of {_size(rest)}"
    )
    yield from captured.notes


def _about_devices(
    captured: Captured, strategy: DistributedStrategy, devices: Sequence[Any]
) -> Iterator[str]:
    rows, count = captured.signature.rows, len(devices)
    kind = _count(count, f"{devices[0].platform} device")
    share = f", {rows // count} of {rows} rows on each" if count > 1 else ""
    yield f"runs on {kind}{share}"
    call = f"jit({strategy.lowering})" if count > 1 else "jit"
    donation = "the new state reuses the memory of the old" if strategy.donate else "no donation"
    yield f"lowered to {call}; {donation}"
    if steps_must_not_overlap(devices):
        yield "each step ends before the next starts: all-reduces of XLA:CPU may deadlock otherwise"


def about_parts(program: Program) -> Iterator[str]:
    """Says how often a step is cut, where it is."""
    if cuts := sum(op.type == "cut" for op in program.root.ops):
        cut = _count(cuts, "place")
        yield f"cut at {cut} into executables that run one after another; see memory_report()"
    if moved := [op for op in program.root.ops if op.type == "to_host"]:
        yield f"{_count(len(moved), 'value')} wait in pinned memory of the host between executables"


def _about_communication(program: Program, strategy: DistributedStrategy) -> Iterator[str]:
    if device_count(program) == 1:
        yield "one device: nothing is communicated"
        return
    reduced = [op for op in _ops(program) if op.type.startswith("c_allreduce")]
    gradients = [op for op in reduced if op.role_var]
    known = {name: v for block in program.blocks for name, v in block.variables.items()}
    reduced_values = [known[grad] for op in gradients for _, grad in op.role_var]
    time = "per step" if strategy.merge == 1 else f"every {strategy.merge} calls"
    yield f"gradients: {_count(len(gradients), 'all-reduce')}, {_size(reduced_values)} {time}"
    if scattered := [op for op in _ops(program) if op.type == "c_reducescatter" and op.role_var]:
        sums = [known[op.reads[0]] for op in scattered]
        yield f"gradients in parts: {_count(len(sums), 'reduce-scatter')}, {_size(sums)} {time}"
    others = [op for op in reduced if not op.role_var]
    if strategy.communication == "local_sgd":
        root = [op for op in others if op in program.root.ops]
        yield f"parameters: {_count(len(others) - len(root), 'all-reduce')} when devices meet"
        others = root
    forward = [op for op in others if op.role.is_forward]
    yield (
        f"statistics, losses and metrics: {_count(len(forward), 'all-reduce')} in forward, "
        f"{len(others) - len(forward)} after it"
    )
    local = [op for op in _ops(program) if op.type == "c_local"]
    if strategy.local_statistics:
        yield f"local_statistics: {len(local)} sums over the batch stay on each device"
    own = [_OWN_ROWS[op.type] for op in _ops(program) if op.type in _OWN_ROWS]
    if own:
        times = _count(len(own), "time")
        yield f"random numbers: each device draws its own rows of what one would ({times})"


def about_notes(program: Program, dumps: Record) -> Iterator[str]:
    """Says where an operator runs on gathered rows, with the user's line."""
    devices = device_count(program)
    if devices == 1:
        return
    source = _one_device(dumps)
    mesh, cut = mesh_of(source, devices)
    notes: dict[str, int] = {}
    for op, why in infer(source, mesh, sharded_inputs=cut, held=summed(source)).notes:
        text = f"{op.source.place() or op.type}: {why}"
        notes[text] = notes.get(text, 0) + 1
    for text, count in list(notes.items())[:_MOST_NOTES]:
        yield f"gathers at {text}" + (f" ({count} operators)" if count > 1 else "")
    if len(notes) > _MOST_NOTES:
        yield f"and at {len(notes) - _MOST_NOTES} more places"


def undivided(program: Program, dumps: Record) -> str | None:
    """Returns why each device or trainer does all of a step that trains, and what to write instead.

    None where gradients of rows are summed over devices, or where there is no gradient.
    """
    if device_count(program) == 1 or not any(op.role_var for op in _ops(program)):
        return None
    if any(_sums_gradients(op) for op in _ops(program)):
        return None
    source = _one_device(dumps)
    mesh, cut = mesh_of(source, device_count(program))
    notes = infer(source, mesh, sharded_inputs=cut, held=summed(source)).notes
    if not notes:
        return f"the gradients are not of the batch. {_INSTEAD['']}"
    op, why = notes[0]
    where = " ".join(op.source.where().split())
    instead = next(text for part, text in _INSTEAD.items() if part in why)
    return f"{why} ({where or op.type}). {instead}"


def _sums_gradients(op: Operator) -> bool:
    """Whether an operator is a reduction of gradients, or of what becomes one."""
    reduces = op.type.startswith("c_") and op.type not in _MOVES
    return reduces and (bool(op.role_var) or not op.role.is_forward)


_MOVES = frozenset({"c_allgather", "c_split", "c_alltoall", *_OWN_ROWS})
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
    """Says what of the optimizer's state is cut over the devices, and why the rest is not."""
    devices = device_count(program)
    if devices == 1 or not strategy.sharded:
        return
    source = _one_device(dumps)
    mesh, cut = mesh_of(source, devices)
    found = cut_state(source, mesh, cut)
    leaves = [source.variables[name] for name, x in found.held.state.items() if x.is_sharded]
    each = sum(map(_bytes, leaves)) / devices
    yield (
        f"sharded: {_count(len(leaves), 'leaf', 'leaves')} of {_size(leaves)} cut over {devices} "
        f"devices, {_as_size(each)} on each; the parameters' new values are gathered"
    )
    reasons: dict[str, list[str]] = {}
    for name, why in found.whole:
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        yield f"whole on every device: {', '.join(names[:_MOST_NAMES])}{more}: {why}"


def _about_what_is_held(program: Program, strategy: DistributedStrategy) -> Iterator[str]:
    """Says what devices have each for itself, and what is kept beside the user's state."""
    if own := [program.variables[name] for name in own_state(program)]:
        yield f"each device has its own of {_count(len(own), 'leaf', 'leaves')}, {_size(own)}"
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
        yield f"products in {strategy.amp}: {_count(halves, 'value')} rounded to it"
    if strategy.merge > 1:
        yield f"one update every {strategy.merge} calls, from the mean of their gradients"
    if held := [program.variables[name] for name in beside(program)]:
        yield f"held beside the state: {_count(len(held), 'variable')} of {_size(held)}"


def _one_device(dumps: Record) -> Program:
    """Returns the program from before it was rewritten for devices."""
    return next(stage.before for stage in dumps if "devices" in stage.after.attrs)


def about_passes(dumps: Record) -> str:
    """Says which passes ran, and how long."""
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


def _count(number: int, one: str, several: str = "") -> str:
    return f"{number} {one}" if number == 1 else f"{number} {several or one + 's'}"
