"""Embedding look-ups in a traced step: primitives, and checks of their use."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxfleet.capture.draft import MARK, Draft
from jaxfleet.capture.gradient_marker import GRADIENT, read_mark
from jaxfleet.errors import CaptureError
from jaxfleet.ir import Operator, Source, Variable
from jaxfleet.ops.pserver_ops import LOOKUP, LOOKUP_GRAD
from jaxfleet.ops.user_frames import line_of_error

PRIMITIVES = frozenset({LOOKUP, LOOKUP_GRAD})
_lookup_p = core.Primitive(LOOKUP)
_lookup_grad_p = core.Primitive(LOOKUP_GRAD)


def _lookup_type(_: Any, keys: Any, *, table: str, dim: int) -> Any:
    del table
    return jax.core.ShapedArray((*keys.shape, dim), np.dtype(np.float32))


def _lookup_grad_type(_: Any, __: Any, *, table: str) -> Any:
    del table
    return jax.core.ShapedArray((), np.dtype(np.float32))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def look_up(table: str, dim: int, handle: Any, keys: Any) -> Any:
    """Returns the rows of keys: `f32[..., dim]`."""
    return _lookup_p.bind(handle, keys, table=table, dim=dim)


def _forward(table: str, dim: int, handle: Any, keys: Any) -> tuple[Any, Any]:
    return _lookup_p.bind(handle, keys, table=table, dim=dim), keys


def _backward(table: str, _: int, keys: Any, gradient: Any) -> tuple[Any, None]:
    return _lookup_grad_p.bind(keys, gradient, table=table), None


_lookup_p.def_abstract_eval(_lookup_type)
_lookup_grad_p.def_abstract_eval(_lookup_grad_type)
look_up.defvjp(_forward, _backward)


def holds_lookup(jaxpr: Any) -> bool:
    """Whether a jaxpr looks up rows, directly or in a part of it."""
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
    """Error for a look-up under `vmap`, or None for any other exception."""
    if LOOKUP not in str(error):
        return None
    what = "a table is looked up inside vmap"
    hint = "look up the whole array of ids before it, which may have any shape, and map its rows"
    return CaptureError(what, source=line_of_error(error), hint=hint)


def in_loop(name: str, source: Source) -> CaptureError:
    """Error for a look-up inside a loop or a branch."""
    what = f"the table '{name}' is looked up inside a loop or a branch"
    hint = "look up all ids before it, since they are known there, and loop over the rows"
    return CaptureError(what, source=source, hint=hint)


def key_leaves(draft: Draft, state: Sequence[Variable], data: Sequence[Variable]) -> set[str]:
    """Checks the look-ups, and returns the leaves of the batch that are keys of tables.

    The step may neither compute keys or handles itself nor look up in a loop.
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
    return found


def looked_up(draft: Draft) -> list[str]:
    """Returns the tables that a step looks up, in order."""
    ops = draft.blocks[0].ops
    return list(dict.fromkeys(str(op.attrs["table"]) for op in ops if op.type in PRIMITIVES))


def used_on_device(draft: Draft) -> set[str]:
    """Returns the values read by operators other than look-ups."""
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


def check_gradients(traced: Sequence[Operator], live: Sequence[Operator]) -> None:
    """Rejects a step in which a table's gradient is not the one that its optimizer is given.

    A table gets the gradient of the loss, independent of later changes to the handle's own. So the
    handle's must reach one update of the optimizer unchanged: otherwise rows would move
    unintentionally, or by a gradient that was scaled for all other parameters. `live` are the
    operators of block 0 in `traced` that are not dead.
    """
    plain: dict[str, frozenset[str]] = {}  # gradients of handles and their sums: summands
    changed: dict[str, Operator] = {}  # other values derived from one
    reached: dict[str, str] = {}  # by gradient of a handle, the marked value
    for op in live:
        reads = set(op.reads)
        if op.type == LOOKUP_GRAD:
            plain[op.writes[0]] = frozenset(op.writes)
        elif op.type == MARK and _marks_gradient(op):
            if (found := next((changed[x] for x in op.reads if x in changed), None)) is not None:
                raise _changed(found)
            for name in reads & plain.keys():
                reached.update(dict.fromkeys(plain[name], op.writes[0]))
        elif op.type in _SUMS and reads and reads <= plain.keys():
            plain[op.writes[0]] = frozenset.union(*(plain[name] for name in reads))
        elif reads & (plain.keys() | changed.keys()):
            changed.update(dict.fromkeys(op.writes, op))
    for op in live:
        if op.type == LOOKUP_GRAD and op.writes[0] not in reached:
            raise _stray(op)
    _refuse_untrained(traced, live)
    _refuse_twice([op for op in live if op.type == LOOKUP_GRAD], reached)


_SUMS = frozenset({"jax.add_any", "jax.add"})


def _refuse_untrained(traced: Sequence[Operator], live: Sequence[Operator]) -> None:
    """Rejects a table that is differentiated but whose gradients are unused."""
    trained = {op.attrs["table"] for op in live if op.type == LOOKUP_GRAD}
    for op in traced:
        if op.type == LOOKUP_GRAD and op.attrs["table"] not in trained:
            raise _stray(op)


def _refuse_twice(gradients: Sequence[Operator], reached: Mapping[str, str]) -> None:
    """Rejects a table that is trained by two updates: its rows are updated once a step."""
    updates: dict[str, str] = {}
    for op in gradients:
        table, update = str(op.attrs["table"]), reached[op.writes[0]]
        if updates.setdefault(table, update) != update:
            what = f"the table '{table}' is trained by two updates in a step"
            hint = "rows are updated once a step: add the losses up, and update once"
            raise CaptureError(what, op=op, source=op.source, hint=hint)


def _changed(op: Operator) -> CaptureError:
    what = "the gradient of a table's handle is changed before the optimizer gets it"
    hint = (
        "a table gets the gradient of the loss itself: scale the loss, or let the optimizer that "
        "distributed_optimizer wraps do it to the other parameters"
    )
    return CaptureError(what, op=op, source=op.source, hint=hint)


def _stray(op: Operator) -> CaptureError:
    what = f"a gradient of the table '{op.attrs['table']}' does not reach the optimizer"
    hint = (
        "give the handle's gradient to the optimizer that distributed_optimizer wraps, with those "
        "of the parameters; what is differentiated for something else, or is not to be trained, "
        "takes jax.lax.stop_gradient(handle)"
    )
    return CaptureError(what, op=op, source=op.source, hint=hint)


def _marks_gradient(op: Operator) -> bool:
    mark = read_mark(op.attrs["mark"])
    return mark is not None and mark.kind == GRADIENT
