"""Checks of a program by what its operators mean: rules of the verifier, and warnings.

The warnings are about frozen running statistics and random keys that never advance.
"""

import re
from collections.abc import Iterator

from jaxfleet.analysis.flow import Flow, FlowValue, OuterUses
from jaxfleet.analysis.sharding import own_state
from jaxfleet.ir import Finding, Kind, Operator, Program, Rule

# These make a replicated value of values that are each device's own.
_SHARED_BY = ("c_allreduce_", "c_allgather")
# These make a device's own value of none, or of a replicated value.
_OWN_BY = frozenset(
    {
        *("c_split", "c_reducescatter", "c_alltoall", "c_summand", "c_local"),
        *("c_iota", "c_random_bits", "c_random_split"),
    }
)


def state_is_replicated(program: Program) -> Iterator[Finding]:
    """In a program for several devices, a device's own value reaches state through a collective."""
    if program.attrs.get("devices", 1) == 1:
        return
    pairs, persistable = program.attrs.get("sharded", ()), (Kind.PARAM, Kind.STATE)
    assert isinstance(pairs, tuple)
    cut = {*own_state(program), *(str(pair[0]) for pair in pairs if isinstance(pair, tuple))}
    data = [v.name for v in program.of_kind(Kind.DATA, *persistable) if v.name in cut]
    flow = Flow.of(program, inputs=data)
    own = {value for value in flow.readers if _is_own(flow, value)}
    for block in program.blocks:
        for place, op in enumerate(block.ops):
            if op.type in _OWN_BY:
                own.update(FlowValue(block.index, place, n) for n in range(len(op.writes)))
    reached = own | flow.reached(own, lambda value: not _is_shared(flow, value))
    for variable in program.of_kind(*persistable):
        if variable.name in cut:
            continue
        value = flow.final.get(variable.name)
        if value in reached:
            what = f"'{variable.name}' ends with another value on each device"
            yield what, flow.op(value)


def released_variables_are_not_read(program: Program) -> Iterator[Finding]:
    """No operator reads a variable that a `delete_var` released, unless it was written again."""
    if not any(op.type == "delete_var" for op in program.root.ops):
        return
    uses, released = OuterUses(program), set[str]()
    for op in program.root.ops:
        used = uses.of(op)
        for name in sorted(released & used.reads):
            what = f"'{name}' is read after delete_var let it go"
            yield (f"'{name}' is let go twice" if op.type == "delete_var" else what), op
        released -= used.writes
        if op.type == "delete_var":
            released.update(op.reads)


meaning_rules: tuple[Rule, ...] = (
    state_is_replicated,
    released_variables_are_not_read,
)


def _is_own(flow: Flow, value: FlowValue) -> bool:
    """Whether a value is a sharded input of the program, given to `Flow` as one."""
    return flow.op(value) is None and value.block == 0


def _is_shared(flow: Flow, value: FlowValue) -> bool:
    op = flow.op(value)
    return op is not None and op.type.startswith(_SHARED_BY)


_STATISTICS = frozenset({"mean", "var"})
_NORMALIZES = re.compile(r"norm|batch_stats|(^|/)bn|bn(_?\d+)?(/|$)", re.IGNORECASE)
_WRAPPERS = frozenset({"value", "raw_value"})  # NNX's wrappers of arrays


def frozen_statistics_warning(program: Program) -> str | None:
    """Text of a warning about normalization with running statistics during training, or None.

    Running statistics are recognised as a pair of state leaves named `mean` and `var`, side by
    side, in a layer whose path names a normalization, that forward reads. Flax's linen and NNX use
    these names, and a layer left in evaluation mode trains with its initial statistics. A feature
    scaler, whose statistics are constant, is not reported.
    """
    ops = [op for block in program.blocks for op in block.ops]
    written = {name for op in ops for name in op.writes}
    if not any(variable.name in written for variable in program.of_kind(Kind.PARAM)):
        return None
    layers: dict[str, dict[str, str]] = {}
    for variable in program.of_kind(Kind.STATE):
        *parents, leaf = [part for part in variable.name.split("/") if part not in _WRAPPERS]
        if leaf in _STATISTICS and variable.name not in written:
            layers.setdefault("/".join(parents), {})[leaf] = variable.name
    pairs = {
        layer: pair
        for layer, pair in layers.items()
        if pair.keys() == _STATISTICS and _NORMALIZES.search(layer) is not None
    }
    readers = {layer: _reader(ops, pair["mean"]) for layer, pair in pairs.items()}
    found = {layer: op for layer, op in readers.items() if op is not None}
    if not found:
        return None
    layer, op = next(iter(found.items()))
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    where = f" ({place})" if (place := op.source.place()) else ""
    return (
        f"'{layer}/mean' and '{layer}/var'{others} are read{where} and never updated: the "
        "normalization uses its running statistics, as in evaluation. To train on the batch's, "
        "apply a linen model with train=True and mutable=['batch_stats'], call model.train() on an "
        "NNX model, and return the new statistics in the state. Where it is meant so, keep them "
        "out of the state: let the step close over them"
    )


def _reader(ops: list[Operator], name: str) -> Operator | None:
    return next((op for op in ops if op.role.is_forward and name in op.reads), None)


_DRAWS = frozenset({"jax.random_bits", "jax.random_gamma"})


def repeated_key_warning(program: Program, *, given: frozenset[str] = frozenset()) -> str | None:
    """Text of a warning about random numbers that are the same at every step, or None.

    They are if a key is computed only from constants: leaves of the state that the step only reads,
    or keys that its function closes over. A key that depends on the batch, on a leaf that the step
    writes (such as the step number), or on one in `given`, which the caller passes at every call,
    causes no warning. Nor does a literal seed in the step (`jax.random.key(0)`) of numbers that no
    parameter's update depends on.
    """
    ops = [op for block in program.blocks for op in block.ops]
    if not any(op.type in _DRAWS for op in ops):
        return None
    written = {name for op in ops for name in op.writes}
    inputs = list(program.variables.values())
    flow = Flow.of(program, inputs=[v.name for v in inputs])
    for block in program.blocks:
        for place, op in enumerate(block.ops):
            if op.type not in _DRAWS:
                continue
            key = flow.sources.get(FlowValue(block.index, place, 0), [])[:1]  # the first operand
            origins = {*key, *flow.reaching(key, lambda _: True)}
            read = [inputs[x.output] for x in origins if x.block == 0 and x.place < 0]
            changes = [v for v in read if v.kind is Kind.DATA or v.name in written | given]
            is_seed = not read
            if changes or (is_seed and not _is_trained_on(program, flow, block.index, place)):
                continue
            if is_seed:
                return _seed_text(op)
            leaves = sorted(v.name for v in read if v.kind.persistable)
            return _text(op, _key_among(leaves))
    return None


def _is_trained_on(program: Program, flow: Flow, block: int, place: int) -> bool:
    """Whether a parameter's new value depends on an operator's first output."""
    reached = flow.reached([FlowValue(block, place, 0)], lambda _: True)
    params = [variable.name for variable in program.of_kind(Kind.PARAM)]
    return any(flow.final.get(name) in reached for name in params)


def _seed_text(draw: Operator) -> str:
    where = f" ({place})" if (place := draw.source.place()) else ""
    return (
        f"random numbers are drawn{where} from a key that the step makes of a constant seed: they "
        "are the same at every step, the same dropout masks for one. Keep the key in the state and "
        "split it in the step, key, sub = jax.random.split(state.key), or draw from "
        "jax.random.fold_in(key, step) with the number of the step; with flax's nnx, keep the "
        "nnx.Rngs beside the model and pass it to the step. Numbers that are meant to stay the "
        "same can be drawn once, before the first step"
    )


def _key_among(leaves: list[str]) -> str | None:
    """Returns the leaf to report: one named like a key, in preference to a counter beside it."""
    named = [x for x in leaves if any(word in x.lower() for word in ("key", "rng", "seed"))]
    return next(iter([*named, *leaves]), None)


def _text(draw: Operator, leaf: str | None) -> str:
    where = f" ({place})" if (place := draw.source.place()) else ""
    if leaf is None:
        return (
            f"random numbers are drawn{where} from a key that the step closes over: they are the "
            "same at every step, the same dropout masks for one. Keep the key in the state and "
            "split it in the step, key, sub = jax.random.split(state.key), or pass one at every "
            "call, step(state, batch, key)"
        )
    return (
        f"'{leaf}' is drawn from{where} and never advanced: every step draws the same numbers, the "
        "same dropout masks for one. Write key, sub = jax.random.split(state.key), draw from sub "
        "and return key in the new state, or draw from jax.random.fold_in(state.key, step) with "
        "the number of the step. Where the caller replaces the key, pass it as an argument: "
        "step(state, batch, key)"
    )
