"""Look-ups in tables inside a user's step: `embedding_table`, and what a step may do with one.

A look-up is a primitive inside a `custom_vjp`. What ties it to differentiation is a handle among
the parameters, a scalar that stays 0: its gradient passes the optimizer like any other, and says
to capture where the table's rows get theirs.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxfleet.capture.draft import MARK, Draft
from jaxfleet.errors import CaptureError
from jaxfleet.ir import Operator, Source, Variable
from jaxfleet.ops.frames import line_of_caller, line_of_error
from jaxfleet.ops.tables import LOOKUP, LOOKUP_GRAD
from jaxfleet.tables import TableSpec
from jaxfleet.tables.spec import Part, Sgd, Uniform

_OPEN = contextvars.ContextVar[dict[str, TableSpec] | None]("tables of the step", default=None)

_lookup_p = core.Primitive(LOOKUP)
_lookup_grad_p = core.Primitive(LOOKUP_GRAD)
PRIMITIVES = frozenset({LOOKUP, LOOKUP_GRAD})


@dataclass(frozen=True)
class EmbeddingTable:
    """A table that a step looks rows up in: `vectors = table(params["users"], batch["ids"])`.

    Attributes:
        spec: what it is.
    """

    spec: TableSpec

    def init(self) -> jax.Array:
        """Returns the handle that goes among the parameters: `f32[]`, 0 now and later."""
        return jnp.zeros((), jnp.float32)

    def __call__(self, handle: Any, keys: Any) -> Any:
        """Returns the rows of keys: `f32[..., dim]`.

        Args:
            handle: what `init` returned, from the parameters that are differentiated.
            keys: integers of any shape, a leaf of the batch as it came.

        Raises:
            CaptureError: this is no step that is captured, or one of the arguments is not as said.
        """
        name, found = self.spec.name, _OPEN.get()
        if found is None:
            what = f"the table '{name}' is looked up outside of a step"
            hint = (
                "a table has rows where a step runs: jf.distribute(train_step, ...)(state, batch)"
            )
            raise CaptureError(what, source=line_of_caller(), hint=hint)
        if found.setdefault(name, self.spec) != self.spec:
            what = f"two tables are called '{name}', and they differ"
            raise CaptureError(what, source=line_of_caller(), hint="give each a name of its own")
        self._check(handle, keys)
        return _looked_up(name, self.spec.dim, handle, keys)

    def _check(self, handle: Any, keys: Any) -> None:
        name = self.spec.name
        if jnp.shape(handle) != () or jnp.result_type(handle) != jnp.float32:
            found = f"{jnp.result_type(handle)}{list(jnp.shape(handle))}"
            what = f"table '{name}': the handle is float32[], and this is {found}"
            hint = f"write {name}(params['{name}'], keys), with {name}.init() among the parameters"
            raise CaptureError(what, source=line_of_caller(), hint=hint)
        if not jnp.issubdtype(jnp.result_type(keys), jnp.integer):
            what = f"table '{name}': keys are integers, and these are {jnp.result_type(keys)}"
            raise CaptureError(what, source=line_of_caller())


def embedding_table(
    name: str,
    dim: int,
    *,
    initializer: Part | None = None,
    optimizer: Part | None = None,
    admission: Part | None = None,
    evictions: Sequence[Part] = (),
    on_nan: str = "refuse",
) -> EmbeddingTable:
    """Describes a table of rows by int64 keys, to be looked up inside a step.

    Its rows are made at first touch. They live where the strategy says: in this process, or on
    servers; a step holds those of its batch alone.

    Args:
        name: its own among a step's tables.
        dim: elements of a row.
        initializer: what a row begins with; `jf.tables.Uniform()` unless given.
        optimizer: what a gradient does to its row; `jf.tables.Sgd()` unless given. The optimizer
            of the other parameters does nothing to a table.
        admission: which keys get a row of their own; all, unless given.
        evictions: which rows go.
        on_nan: a gradient that is not finite: `refuse` the push, or `skip` its row.

    Raises:
        CaptureError: the name or the dim is none.
    """
    if not name or not isinstance(name, str):
        raise CaptureError(f"a table's name is {name!r}", source=line_of_caller())
    if not isinstance(dim, int) or dim < 1:
        what = f"table '{name}': dim is {dim!r}, and a row has at least one element"
        raise CaptureError(what, source=line_of_caller())
    if on_nan not in {"refuse", "skip"}:
        what = f"table '{name}': on_nan is {on_nan!r}, not 'refuse' or 'skip'"
        raise CaptureError(what, source=line_of_caller())
    spec = TableSpec(
        name=name,
        dim=dim,
        initializer=initializer if initializer is not None else Uniform(),
        optimizer=optimizer if optimizer is not None else Sgd(),
        admission=admission,
        evictions=tuple(evictions),
        on_nan=on_nan,  # type: ignore[arg-type]  # it was checked
    )
    return EmbeddingTable(spec)


@contextlib.contextmanager
def looking_up() -> Iterator[dict[str, TableSpec]]:
    """Lets tables be looked up; yields those that are, by name."""
    token = _OPEN.set({})
    try:
        found = _OPEN.get()
        assert found is not None
        yield found
    finally:
        _OPEN.reset(token)


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
        found.add(str(keys))
        if op.type == LOOKUP and op.inputs[0] not in handles:
            what = f"the handle of table '{op.attrs['table']}' is not a leaf of the state"
            raise CaptureError(what, op=op, source=op.source, hint="pass it as it came")
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
            if op.reads[0] in changed:
                raise _changed(changed[op.reads[0]])
        elif reads & (plain.keys() | changed.keys()) and len(op.writes) == 1:
            changed.update(dict.fromkeys(op.writes, op))


def _changed(op: Operator) -> CaptureError:
    what = "the gradient of a table's handle is changed before the optimizer gets it"
    hint = (
        "a table gets the gradient of the loss itself: scale the loss, or let the optimizer that "
        "distributed_optimizer wraps do it to the other parameters"
    )
    return CaptureError(what, op=op, source=op.source, hint=hint)


def _lookup_type(_: Any, keys: Any, *, table: str, dim: int) -> Any:
    del table
    return jax.core.ShapedArray((*keys.shape, dim), np.dtype(np.float32))


def _lookup_grad_type(_: Any, __: Any, *, table: str) -> Any:
    del table
    return jax.core.ShapedArray((), np.dtype(np.float32))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _looked_up(table: str, dim: int, handle: Any, keys: Any) -> Any:
    return _lookup_p.bind(handle, keys, table=table, dim=dim)


def _forward(table: str, dim: int, handle: Any, keys: Any) -> tuple[Any, Any]:
    return _lookup_p.bind(handle, keys, table=table, dim=dim), keys


def _backward(table: str, _: int, keys: Any, gradient: Any) -> tuple[Any, None]:
    return _lookup_grad_p.bind(keys, gradient, table=table), None


_lookup_p.def_abstract_eval(_lookup_type)
_lookup_grad_p.def_abstract_eval(_lookup_grad_type)
_looked_up.defvjp(_forward, _backward)
