"""Random keys that a training step draws from and never advances: the same numbers every step."""

from jaxfleet.analysis.flow import Flow, Value
from jaxfleet.ir import Kind, Operator, Program

_DRAWS = frozenset({"jax.random_bits", "jax.random_gamma"})


def repeated_key_warning(program: Program, *, given: frozenset[str] = frozenset()) -> str | None:
    """Text of a warning about random numbers that are the same at every step, or None.

    That is so where all that a key is computed from stays as it is: leaves of the state that the
    step only reads, or keys that its function closes over. A key that depends on the batch, on a
    leaf that the step writes (the number of the step, say) or on a seed that is written out in the
    step (`jax.random.key(0)`, which means the same numbers) is not warned of.

    Args:
        program: a captured training step.
        given: leaves of the state that the caller hands in at every call, as it does the batch.
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
            key = flow.sources.get(Value(block.index, place, 0), [])[:1]  # the first operand
            origins = {*key, *flow.reaching(key, lambda _: True)}
            read = [inputs[x.output] for x in origins if x.block == 0 and x.place < 0]
            changes = [v for v in read if v.kind is Kind.DATA or v.name in written | given]
            if not read or changes:
                continue
            leaves = sorted(v.name for v in read if v.kind.persistable)
            return _text(op, _key_among(leaves))
    return None


def _key_among(leaves: list[str]) -> str | None:
    """Returns the leaf that is shown: one that is named as a key is, before a counter beside it."""
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
