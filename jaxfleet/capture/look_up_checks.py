"""What a step may do with look-ups, once it is traced; and what to say where it does otherwise."""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxfleet.capture.draft import MARK, Draft
from jaxfleet.capture.look_up import PRIMITIVES
from jaxfleet.errors import CaptureError
from jaxfleet.ir import Operator, Source, Variable
from jaxfleet.ops.frames import line_of_error
from jaxfleet.ops.tables import LOOKUP, LOOKUP_GRAD


def holds_lookup(jaxpr: Any) -> bool:
    """Tells whether a jaxpr looks rows up, itself or in a part of it."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return any(
        eqn.primitive.name in PRIMITIVES or any(map(holds_lookup, _parts(eqn)))
        for eqn in inner.eqns
    )


def _parts(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if hasattr(part, "eqns") or hasattr(getattr(part, "jaxpr", None), "eqns"):
                yield part


def is_batched(error: NotImplementedError) -> CaptureError | None:
    """Returns what to say of a look-up under `vmap`, or None where that is not the error."""
    if LOOKUP not in str(error):
        return None
    what = "a table is looked up inside vmap"
    hint = "look up the whole array of ids before it, which may have any shape, and map its rows"
    return CaptureError(what, source=line_of_error(error), hint=hint)


def in_loop(name: str, source: Source) -> CaptureError:
    """Returns the error for a look-up inside a loop or a branch."""
    what = f"the table '{name}' is looked up inside a loop or a branch"
    hint = "look up all ids before it, since they are known there, and loop over the rows"
    return CaptureError(what, source=source, hint=hint)


def key_leaves(draft: Draft, state: Sequence[Variable], data: Sequence[Variable]) -> set[str]:
    """Returns the leaves of the batch that are keys of tables, once look-ups are found good.

    Raises:
        CaptureError: keys, or a handle, are computed by the step; a look-up is in a loop; the
            gradient of a handle is changed on its way to the optimizer.
    """
    _refuse_inner(draft)
    ops = draft.blocks[0].ops
    handles, leaves = {v.name for v in state}, {v.name for v in data}
    found: set[str] = set()
    for op in (op for op in ops if op.type in PRIMITIVES):
        keys = op.inputs[1 if op.type == LOOKUP else 0]
        if keys not in leaves:
            raise _computed(
                op, "a leaf of the state" if keys in handles else "computed by the step"
            )
        if op.type == LOOKUP and not isinstance(op.inputs[0], str):
            what = f"the handle of table '{op.attrs['table']}' is a number, so nothing trains it"
            hint = "pass the handle from the parameters; jax.lax.stop_gradient(handle) freezes it"
            raise CaptureError(what, op=op, source=op.source, hint=hint)
        found.add(str(keys))
    _refuse_changed_gradients(ops)
    return found


def looked_up(draft: Draft) -> list[str]:
    """Returns the tables that a step looks up, in the order that it does."""
    ops = draft.blocks[0].ops
    return list(dict.fromkeys(str(op.attrs["table"]) for op in ops if op.type in PRIMITIVES))


def used_on_device(draft: Draft) -> set[str]:
    """Returns what operators that are no look-ups read."""
    read = {x for x in draft.results if isinstance(x, str)}
    for block in draft.blocks:
        for op in block.ops:
            skipped = {LOOKUP: 1, LOOKUP_GRAD: 0}.get(op.type, -1)
            read.update(x for i, x in enumerate(op.inputs) if i != skipped and isinstance(x, str))
    return read


def _computed(op: Operator, kind: str) -> CaptureError:
    what = f"the keys of table '{op.attrs['table']}' are {kind}"
    hint = (
        "keys go from the batch to the table as int64, past the device: put them into the batch as "
        "a leaf of their own; to take some of a leaf, look all of it up and take the rows"
    )
    return CaptureError(what, op=op, source=op.source, hint=hint)


def _refuse_inner(draft: Draft) -> None:
    for block in draft.blocks[1:]:
        for op in block.ops:
            if op.type in PRIMITIVES:
                raise in_loop(str(op.attrs["table"]), op.source)


def _refuse_changed_gradients(ops: Sequence[Operator]) -> None:
    """Refuses a step that scales gradients, say, before the optimizer sees them.

    The rows' gradients would not be scaled with them, and nobody would know.
    """
    plain: dict[str, Operator] = {}  # gradients of handles, and sums of such
    changed: dict[str, Operator] = {}  # what else is made of one
    for op in ops:
        reads = set(op.reads)
        is_sum = op.type in {"jax.add_any", "jax.add"} and reads and reads <= plain.keys()
        if op.type == LOOKUP_GRAD or is_sum:
            plain.update(dict.fromkeys(op.writes, op))
        elif op.type == MARK:
            if (found := next((changed[x] for x in op.reads if x in changed), None)) is not None:
                raise _changed(found)
        elif reads & (plain.keys() | changed.keys()) and len(op.writes) == 1:
            changed.update(dict.fromkeys(op.writes, op))


def _changed(op: Operator) -> CaptureError:
    what = "the gradient of a table's handle is changed before the optimizer gets it"
    hint = (
        "a table gets the gradient of the loss itself: scale the loss, or let the optimizer that "
        "distributed_optimizer wraps do it to the other parameters"
    )
    return CaptureError(what, op=op, source=op.source, hint=hint)
