"""`embedding_table`, and the look-ups of a step in a table.

A look-up is a primitive inside a `custom_vjp`. It is tied to differentiation by a handle among the
parameters, a scalar that stays 0: its gradient passes the optimizer like any other, and shows
capture where the table's rows get theirs.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfleet.capture.embedding.lookup import look_up
from jaxfleet.errors import CaptureError
from jaxfleet.ops.user_frames import line_of_caller
from jaxfleet.tables import TableSpec
from jaxfleet.tables.optimizer_parts import Sgd
from jaxfleet.tables.spec import Uniform
from jaxfleet.tables.store import TableStore
from jaxfleet.tables.validation import Part

# A look-up costs a round trip to servers before the step can begin; a dense table costs sending all
# rows both ways at every step. A rule of thumb: not measured yet.
DENSE_BYTES = 256 << 10

_OPEN = contextvars.ContextVar["dict[str, EmbeddingTable] | None"](
    "tables that the step looks up", default=None
)

_ANSWER = contextvars.ContextVar["Callable[[EmbeddingTable, Any], Any] | None"](
    "what gives rows to a function that is evaluated outside of a step", default=None
)


@dataclass(frozen=True)
class EmbeddingTable:
    """A table for look-ups in a step: `vectors = table(params["users"], batch["ids"])`.

    Attributes:
        spec: its spec.
        rows: number of keys, which count from 0; None if any int64 is a key.
        is_dense: all its rows are one parameter, which the step's optimizer trains.
        why: the reason for that.
    """

    spec: TableSpec
    rows: int | None = None
    is_dense: bool = False
    why: str = "any int64 is a key"

    def __repr__(self) -> str:
        rows = "" if self.rows is None else f", rows={self.rows}"
        return f"EmbeddingTable({self.name!r}, dim={self.dim}{rows})"

    @property
    def name(self) -> str:
        """Its name, as used by `step.look_up`."""
        return self.spec.name

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self.spec.dim

    def init(self) -> jax.Array:
        """Returns the table's parameter.

        A handle, `f32[]`, which stays 0; for a dense table all rows, `f32[rows, dim]`, with the
        initial values of a sparse table's.
        """
        if not self.is_dense:
            return jnp.zeros((), jnp.float32)
        assert self.rows is not None
        keys = np.arange(self.rows, dtype=np.int64)
        return jnp.asarray(TableStore(self.spec).look_up(keys))

    def __call__(self, handle: Any, keys: Any) -> Any:
        """Returns the rows of keys: `f32[..., dim]`.

        Args:
            handle: the result of `init`, from the parameters that are differentiated.
            keys: integers of any shape, an unchanged leaf of the batch. Those of a dense table may
                be any integers from 0; one out of range gives NaN.

        Raises:
            CaptureError: no step is being captured, or an argument is invalid.
        """
        name, found, answer = self.spec.name, _OPEN.get(), _ANSWER.get()
        if answer is not None and not self.is_dense:
            self._check(handle, keys)
            return answer(self, keys)
        if found is None and not self.is_dense:
            what = f"the table '{name}' is looked up outside of a step"
            hint = "step.evaluate(function, state, batch) runs a function that looks rows up"
            raise CaptureError(what, source=line_of_caller(), hint=hint)
        if found is not None and found.setdefault(name, self) != self:
            what = f"two tables are called '{name}', and they differ"
            raise CaptureError(what, source=line_of_caller(), hint="give each a name of its own")
        self._check(handle, keys)
        if self.is_dense:
            return jnp.take(handle, keys, axis=0)
        return look_up(name, self.spec.dim, handle, keys)

    def __str__(self) -> str:
        spec = self.spec
        if self.is_dense:
            size = f"f32[{self.rows},{spec.dim}]"
            return f"table '{spec.name}' is a dense parameter, {size}: {self.why}"
        optimizer, initializer = spec.optimizer.kind, spec.initializer.kind
        what = f"rows of {spec.dim}, {initializer} at first touch, trained by {optimizer}"
        rules = [f"admission {_said(spec.admission)}"] if spec.admission is not None else []
        rules += [f"eviction {_said(part)}" for part in spec.evictions]
        said = "; ".join([what, *rules])
        return f"table '{spec.name}': {said}; looked up by key: {self.why}"

    def _check(self, handle: Any, keys: Any) -> None:
        name = self.spec.name
        wanted = (self.rows, self.spec.dim) if self.is_dense else ()
        if jnp.shape(handle) != wanted or jnp.result_type(handle) != jnp.float32:
            found = f"{jnp.result_type(handle)}{list(jnp.shape(handle))}"
            kind = f"rows are float32{list(wanted)}" if wanted else "handle is float32[]"
            what = f"table '{name}': the {kind}, and this is {found}"
            hint = f"write {name}(params['{name}'], keys), with {name}.init() among the parameters"
            raise CaptureError(what, source=line_of_caller(), hint=hint)
        if not hasattr(keys, "dtype"):
            what = (
                f"table '{name}': keys are one array of integers, and this is {type(keys).__name__}"
            )
            hint = "make them an array before the step: np.asarray(keys)"
            raise CaptureError(what, source=line_of_caller(), hint=hint)
        if not jnp.issubdtype(jnp.result_type(keys), jnp.integer):
            what = f"table '{name}': keys are integers, and these are {jnp.result_type(keys)}"
            hint = "look up a leaf of integers"
            raise CaptureError(what, source=line_of_caller(), hint=hint)


def _said(part: Part) -> str:
    """Formats a part as in a script: `Unseen(steps=9)`."""
    return f"{type(part).__name__}({', '.join(f'{n}={v}' for n, v in asdict(part).items())})"


def embedding_table(
    name: str,
    dim: int,
    *,
    initializer: Part | None = None,
    optimizer: Part | None = None,
    admission: Part | None = None,
    evictions: Part | Sequence[Part] = (),
    on_nan: str = "refuse",
    rows: int | None = None,
    dense: bool | None = None,
    memory_rows: int | None = None,
) -> EmbeddingTable:
    """Describes a table of rows by int64 keys, to be looked up inside a step.

    Rows are created at first touch. The strategy decides where they live: in this process, or on
    servers; a step holds those of its batch alone.

    Args:
        name: unique in a step.
        dim: elements of a row.
        initializer: initial values of a row; by default `jf.tables.Uniform()`.
        optimizer: update of a row by a gradient; by default `jf.tables.Sgd()`. The optimizer of
            the other parameters does not affect a table.
        admission: which keys get a row of their own; by default all.
        evictions: one or several rules for removing rows.
        on_nan: effect of a non-finite gradient: `refuse` the push, or `skip` its row.
        rows: number of keys, if they count from 0; otherwise any int64 is a key.
        dense: whether all rows are one parameter, which the step's optimizer trains like any other.
            By default a table of few bytes is dense if its rows are known and no optimizer,
            admission, evictions or memory bound is given, which a parameter cannot have.
        memory_rows: number of rows that all servers together keep in memory; the least recently
            used ones are on disk. By default all are in memory.

    Raises:
        CaptureError: the name, `dim` or a number of rows is invalid, or the table cannot be dense.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jaxfleet as jf
        >>> users = jf.embedding_table("users", dim=2, initializer=jf.tables.Constant(0.5))
        >>> def total(handle, batch):
        ...     return handle, users(handle, batch["ids"]).sum()
        >>> batch = {"ids": jnp.array([3, 7, 3])}
        >>> step = jf.distribute(total, example=(users.init(), batch), strategy="single")
        >>> step(users.init(), batch)[1]
        Array(3., dtype=float32)
    """
    if not name or not isinstance(name, str):
        raise CaptureError(f"a table's name is {name!r}", source=line_of_caller())
    if isinstance(dim, bool) or not isinstance(dim, int | np.integer) or dim < 1:
        what = f"table '{name}': dim is {dim!r}, and a row has at least one element"
        raise CaptureError(what, source=line_of_caller())
    if on_nan not in {"refuse", "skip"}:
        what = f"table '{name}': on_nan is {on_nan!r}, not 'refuse' or 'skip'"
        raise CaptureError(what, source=line_of_caller())
    if memory_rows is not None and (not isinstance(memory_rows, int) or memory_rows < 1):
        what = f"table '{name}': memory_rows is {memory_rows!r}, and at least one row is in memory"
        raise CaptureError(what, source=line_of_caller())
    if not isinstance(evictions, Sequence):
        evictions = [evictions]
    spec = TableSpec(
        name=name,
        dim=int(dim),
        initializer=initializer if initializer is not None else Uniform(),
        optimizer=optimizer if optimizer is not None else Sgd(),
        admission=admission,
        evictions=tuple(evictions),
        on_nan=on_nan,  # type: ignore[arg-type]  # it was checked
        memory_rows=memory_rows,
    )
    plain = optimizer is None and admission is None and not evictions and memory_rows is None
    is_dense, why = _choice(spec, rows, dense=dense, is_plain=plain)
    return EmbeddingTable(spec, rows, is_dense, why)


def _choice(
    spec: TableSpec, rows: int | None, *, dense: bool | None, is_plain: bool
) -> tuple[bool, str]:
    if rows is not None and (not isinstance(rows, int) or rows < 1):
        what = f"table '{spec.name}': rows is {rows!r}, and a table that has some has at least one"
        raise CaptureError(what, source=line_of_caller())
    if dense and (rows is None or not is_plain):
        lacks = "how many rows it has" if rows is None else "no optimizer, admission or evictions"
        what = f"table '{spec.name}' cannot be dense: {lacks} must be given"
        raise CaptureError(what, source=line_of_caller(), hint="a dense table is a parameter")
    if dense is not None:
        return dense, f"dense={dense} was given"
    if rows is None:
        return False, "any int64 is a key"
    if not is_plain:
        return False, "it has rules of its own"
    size = rows * spec.dim * 4
    if size <= DENSE_BYTES:
        return True, f"{size:,} bytes cost less than a look-up ({DENSE_BYTES:,})"
    return False, f"{size:,} bytes cost more than a look-up ({DENSE_BYTES:,})"


@contextlib.contextmanager
def answering(answer: Callable[[EmbeddingTable, Any], Any]) -> Iterator[None]:
    """Answers look-ups by a function of the table and its keys."""
    token = _ANSWER.set(answer)
    try:
        yield
    finally:
        _ANSWER.reset(token)


@contextlib.contextmanager
def looking_up() -> Iterator[dict[str, EmbeddingTable]]:
    """Enables look-ups; yields the tables looked up, by name."""
    token = _OPEN.set({})
    try:
        found = _OPEN.get()
        assert found is not None
        yield found
    finally:
        _OPEN.reset(token)
