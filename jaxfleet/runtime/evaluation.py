"""Evaluation of a user's function on the current state, in every mode.

`step.evaluate(function, state, batch)` computes `function(state, batch)`, where the state may have
leaves on servers, on several devices or on several processes. The function is traced first, to
find the leaves of the state and the rows of tables that it reads; only those are fetched.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Never, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxfleet.capture import Captured
from jaxfleet.capture.embedding.tables import EmbeddingTable, answering
from jaxfleet.capture.signature import difference, spec_of
from jaxfleet.errors import CaptureError, FeedError
from jaxfleet.ops.jax_adapter import read_arguments
from jaxfleet.ops.user_frames import line_of_caller
from jaxfleet.runtime.training_step import Batch, Metrics, Result, State

Function: TypeAlias = Callable[[Any, Any], Any]
_KEPT = 32  # compiled functions; otherwise a new lambda at every call would accumulate


@dataclass(frozen=True)
class _Reads:
    """Inputs that a function reads."""

    leaves: AbstractSet[int]  # the places of leaves of the state
    # A table's name and the place of its keys among the batch's leaves, a look-up each
    rows: tuple[tuple[str, int], ...]


class Evaluating(ABC, Generic[State, Metrics]):
    """A step whose state a user's function may be evaluated on.

    Attributes:
        captured: the one-device program.
    """

    captured: Captured

    def evaluate(
        self, function: Callable[[State, Batch], Result], state: State, batch: Batch, *more: Never
    ) -> Result:
        """Returns `function(state, batch)`, computed here with the current state.

        For example for accuracy on held-out data. The function is compiled once for each shape of
        the batch. It may look up tables, by keys that are leaves of the batch; nothing is trained.
        Of servers only the function's inputs are fetched, and other trainers take no part.

        Args:
            function: takes the state, as `train_step` does, and a batch of any structure.
            state: the result of the last step, or without servers a similar one.
            batch: whole, with any number of rows; its structure may differ from the step's.
            more: must be empty; pass several values as one batch, a tuple.

        Raises:
            FeedError: the state does not match, or `more` is not empty.
            CaptureError: the keys of a look-up are not a leaf of the batch.
            PeerLostError: a server is gone or late.
        """
        if more:
            what = f"evaluate takes a function, a state and one batch, and {len(more)} more were "
            hint = "pass a tuple: step.evaluate(function, state, (x, y)), to a "
            raise FeedError(f"{what}given", hint=f"{hint}function(state, batch)")
        leaves = jax.tree_util.tree_leaves(state)
        result: Result = self._evaluator(
            function,
            state,
            self._spread(batch),
            bring=lambda places: self._readable_leaves(state, leaves, places),
            look_up=self.look_up,
        )
        return result

    @abstractmethod
    def look_up(self, table: str, keys: Any) -> np.ndarray:
        """Returns rows of a table."""

    @abstractmethod
    def _readable_leaves(
        self, state: Any, leaves: Sequence[Any], places: AbstractSet[int]
    ) -> Mapping[int, Any]:
        """Returns values of some leaves of a state, by place."""

    def _spread(self, batch: Any) -> Any:
        """Returns the batch where it is to be computed."""
        return batch

    @cached_property
    def _evaluator(self) -> "Evaluator":
        return Evaluator(self.captured)


class Evaluator:
    """Compiles evaluated functions, once for each shape of the batch."""

    def __init__(self, captured: Captured) -> None:
        self._signature = captured.signature
        self._specs = [spec_of(leaf) for leaf in captured.signature.state]
        self._known: dict[Any, tuple[_Reads, Callable[..., Any]]] = {}

    def __call__(
        self,
        function: Function,
        state: Any,
        batch: Any,
        *,
        bring: Callable[[AbstractSet[int]], Mapping[int, Any]],
        look_up: Callable[[str, np.ndarray], Any],
    ) -> Any:
        """Returns `function(state, batch)`; only the state's leaves that it reads must be readable.

        `bring` returns values for leaves of the state, by place; `look_up` returns rows of a table:
        its name and i64[...] to f32[..., dim].

        Raises:
            FeedError: the state's structure differs from the example's.
            CaptureError: the keys of a look-up are not a leaf of the batch.
        """
        tree = jax.tree_util.tree_structure(state)
        if tree != self._signature.state_tree:
            found = difference(self._signature.state_tree, tree)
            raise FeedError(
                f"evaluate: the state has another structure than the step's: {found}",
                hint="pass the whole state that the step returned, and a function that takes it, "
                "and calls model.eval() of an nnx model itself",
            )
        data, batch_tree = jax.tree_util.tree_flatten(batch)
        reads, run = self._compiled(function, data, batch_tree)
        rows = [np.asarray(look_up(table, np.asarray(data[at]))) for table, at in reads.rows]
        values = bring(reads.leaves)
        keys = {at for _, at in reads.rows}
        # Keys are no longer needed: jax would truncate those of 64 bits.
        on_device = [np.zeros(np.shape(x), np.int32) if at in keys else x
                     for at, x in enumerate(data)]  # fmt: skip
        return run({at: values[at] for at in sorted(reads.leaves)}, on_device, rows)

    def _compiled(
        self, function: Function, data: Sequence[Any], batch_tree: Any
    ) -> tuple[_Reads, Callable[..., Any]]:
        shapes = tuple((np.shape(x), str(getattr(x, "dtype", type(x)))) for x in data)
        key = (function, batch_tree, shapes)
        if key not in self._known:
            if len(self._known) >= _KEPT:
                del self._known[next(iter(self._known))]
            self._known[key] = self._compile(function, data, batch_tree)
        return self._known[key]

    def _compile(
        self, function: Function, data: Sequence[Any], batch_tree: Any
    ) -> tuple[_Reads, Callable[..., Any]]:
        unflatten, state_tree = jax.tree_util.tree_unflatten, self._signature.state_tree
        looked_up: list[tuple[str, int]] = []

        def traced(leaves: Sequence[Any], batch: Sequence[Any], rows: Sequence[Any]) -> Any:
            answer = _Answers(batch, rows, looked_up)
            with answering(answer):
                return function(unflatten(state_tree, leaves), unflatten(batch_tree, batch))

        def run(values: Mapping[int, Any], batch: Sequence[Any], rows: Sequence[Any]) -> Any:
            # jax's arrays: an nnx model in training mode updates what it does not read otherwise.
            specs = enumerate(self._specs)
            leaves = [values[at] if at in values else _zeros(spec) for at, spec in specs]
            return traced(leaves, batch, rows)

        jaxpr = jax.make_jaxpr(traced)(self._specs, list(data), ())
        used = read_arguments(jaxpr)[: len(self._specs)]
        reads = _Reads(frozenset(at for at, is_read in enumerate(used) if is_read),
                       tuple(looked_up))  # fmt: skip
        return reads, jax.jit(run)


class _Answers:
    """Answers look-ups while a function is traced: first records them, then returns rows.

    Args:
        batch: the batch's leaves, as traced.
        rows: one array for each look-up, in order; none while look-ups are recorded.
        found: receives the table and the keys' place of each recorded look-up.
    """

    def __init__(
        self, batch: Sequence[Any], rows: Sequence[Any], found: list[tuple[str, int]]
    ) -> None:
        self._batch, self._rows, self._found = batch, iter(rows), found
        self._is_first = not rows

    def __call__(self, table: EmbeddingTable, keys: Any) -> Any:
        if not self._is_first:
            return next(self._rows)
        place = next((at for at, leaf in enumerate(self._batch) if leaf is keys), None)
        if place is None:
            raise CaptureError(
                f"table '{table.name}' is looked up by keys that are no leaf of the batch",
                source=line_of_caller(),
                hint="compute the keys before step.evaluate, and pass them in the batch",
            )
        self._found.append((table.name, place))
        return jnp.zeros((*np.shape(keys), table.dim), np.float32)


def _zeros(spec: jax.ShapeDtypeStruct) -> Any:
    """Returns zeros of a type, or random keys, for an unused leaf."""
    if not jnp.issubdtype(spec.dtype, jax.dtypes.prng_key):
        return jnp.zeros(spec.shape, spec.dtype)
    impls: list[Any] = []

    def data_of(keys: Any) -> Any:
        impls.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    data = jax.eval_shape(data_of, spec)
    return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=impls[0])
