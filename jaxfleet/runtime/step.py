"""Step: a distributed training step, with the signature of the user's own."""

import operator
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxfleet.capture import Captured
from jaxfleet.errors import JaxfleetError
from jaxfleet.lower import LoweredStep
from jaxfleet.observability import Progress
from jaxfleet.ops.user_frames import warn_at_caller
from jaxfleet.passes.precision.skip_nonfinite import SCALE
from jaxfleet.runtime.compiled_variants import Variant, Variants
from jaxfleet.runtime.devices import steps_must_not_overlap
from jaxfleet.runtime.evaluation import Evaluating
from jaxfleet.runtime.explain import undivided
from jaxfleet.runtime.metrics_log import Logging
from jaxfleet.runtime.nonfinite_watch import FiniteWatch
from jaxfleet.runtime.periodic_saves import PeriodicSaver
from jaxfleet.runtime.scalar_metrics import ScalarMetrics
from jaxfleet.runtime.step_call import Call
from jaxfleet.runtime.step_checkpoints import CheckpointMethods
from jaxfleet.runtime.step_inputs import (
    check_batch,
    check_rows,
    check_state,
    mistake_in,
    place_batch,
    place_state,
    used_before,
)
from jaxfleet.runtime.step_introspection import StepViews
from jaxfleet.runtime.step_state import LastState
from jaxfleet.runtime.step_tables import TableMethods
from jaxfleet.runtime.training_step import Metrics, State
from jaxfleet.runtime.transpile import calls_to_measure, end_if_only_dumping
from jaxfleet.strategy import DistributedStrategy
from jaxfleet.tables.access import LocalTables
from jaxfleet.tables.host_lookup import specs_of


class Step(StepViews, TableMethods, CheckpointMethods[State], Logging, Evaluating[State, Metrics]):
    """A distributed training step: `state, metrics = step(state, batch)`.

    Attributes:
        strategy: how it is distributed.
        devices: where it runs.
        captured: the one-device program.
        tables: the tables that it looks up, which are kept here.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jaxfleet as jf
        >>> def add_rows(total, batch):
        ...     return total + batch.sum(0), {"largest": batch.max()}
        >>> batch = jnp.ones((4, 2))
        >>> step = jf.distribute(add_rows, example=(jnp.zeros(2), batch), strategy="single")
        >>> step
        Step('add_rows', mode='single', devices=1)
        >>> step(jnp.zeros(2), batch)
        (Array([4., 4.], dtype=float32), {'largest': Array(1., dtype=float32)})
    """

    _whole_trees = True  # one device may receive the user's state as it is
    _shares_scalars = False  # no other thread reads them

    def __init__(
        self,
        captured: Captured,
        strategy: DistributedStrategy,
        devices: Sequence[Any],
        dump_dir: Path | None = None,
    ) -> None:
        self.captured = captured
        self.strategy = strategy
        self.devices = tuple(devices)
        self.tables = LocalTables(specs_of(captured.program))
        self._waits = steps_must_not_overlap(self.devices)
        self._variants = Variants(captured, strategy, self.devices, dump_dir)
        self._calls: dict[tuple[Any, ...], Call] = {}  # by the structure and types of a batch
        self._returned = LastState()
        self._saver: PeriodicSaver | None = None
        self._restored, self._restored_steps = LastState(), 0
        self._returned_tree = 0  # id of the state returned last; of one since freed it may recur
        self._scalars = ScalarMetrics(is_shared=self._shares_scalars)
        self._finite = FiniteWatch(
            strategy.on_nonfinite,
            [captured.program.variables[leaf.name] for leaf in captured.signature.state],
            speaks=lambda: self._speaks,
        )
        rows = self._whole(captured.signature.rows)
        check_rows(rows, len(self.devices))
        self._example = self._variants.at(rows)
        self._held = self._example.holds(captured)
        if (why := undivided(self._example.program, self._example.dumps)) is not None:
            count = len(self.devices)
            warn_at_caller(
                f"'{captured.program.name}' is not divided: each of {count} devices does all of "
                f"the work, since {why}"
            )

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """Runs one step.

        Args:
            state: as for `train_step`; its memory is reused if the strategy's `donate` is set.
            batch: the global batch; any number of rows that the devices can share.

        Returns:
            The results of `train_step`: the new state and the metrics, complete over all devices.

        Raises:
            FeedError: the state or the batch does not match the example.
        """
        # This code runs at every step, so it inspects the leaves as little as possible.
        data, batch_tree = _flatten(batch)
        key = (batch_tree, *map(_shape_and_dtype, data))
        call = self._calls.get(key)
        if call is not None:
            state, metrics = self._called(call, state, data)
        else:
            state, metrics = self._first_called(key, state, data, batch_tree)
        if self._saver is not None:
            self._saver.after_step(state)
        return state, metrics

    def _first_called(
        self, key: tuple[Any, ...], state: State, data: list[Any], batch_tree: Any
    ) -> tuple[State, Metrics]:
        with Progress(f"first call of '{self.captured.program.name}'") as progress:
            progress.show("running its passes")
            call = self._calls[key] = Call(self._new_variant(data, batch_tree))
            if len(self._calls) == 1 and (calls := calls_to_measure()):
                progress.show("measuring it for its dump")
                self._measure_for_dump(calls)
            end_if_only_dumping()
            progress.show("compiling and running it")
            return self._called(call, state, data)

    def _called(self, call: Call, state: State, data: list[Any]) -> tuple[State, Metrics]:
        variant, joined = call.variant, None
        if variant.tables is not None:
            data, joined = variant.tables.bring(self.tables, data)
        data = self._placed(data, variant.lowered)
        whole = self._whole_trees and variant.tables is None and variant.lowered.takes_trees
        run = self._run_on_tree if whole else self._run_on_leaves
        state, fetched, finite = run(call, state, data)
        if variant.tables is not None and joined is not None:
            fetched = variant.tables.hand_over(self.tables, joined, fetched)
            self.tables.next_step()
        metrics = _unflatten(variant.metrics_tree, fetched)
        self._scalars.note(fetched, variant.metrics)
        self._finite.note(fetched, variant.metrics_tree, state, finite)
        return state, metrics

    def _run_on_tree(self, call: Call, state: Any, data: list[Any]) -> tuple[Any, Any, Any]:
        """Runs a step of one device on the user's state as it is; jit flattens and checks it.

        What it rejects is not like the state that a step returns: those leaves are checked and
        placed, as they are at the first call.
        """
        self._returned, lowered = LastState(), call.variant.lowered
        is_returned = id(state) == self._returned_tree
        made = call.on_accepted(state, data, is_returned=is_returned)
        if made is None:
            leaves, tree = _flatten(state)
            state = _unflatten(tree, self._taken(leaves, tree, data, lowered))
            if call.executable is None:
                call.executable = lowered.run.lower(state, [], data).compile()
            made = self._run(lowered.run, state, [], data)
        state, fetched, finite = made
        self._returned_tree = id(state)
        return state, fetched, (finite,)

    def _run_on_leaves(self, call: Call, state: Any, data: list[Any]) -> tuple[Any, Any, Any]:
        """Runs a step on lists of the leaves, some of which it keeps, or which are elsewhere."""
        lowered = call.variant.lowered
        leaves, tree = _flatten(state)
        is_new = not self._returned.is_made_of(leaves)
        if is_new:
            leaves = self._agreed(leaves, tree)
        if self._held is not None:
            leaves = self._held.taken(leaves, tree, data)
        elif is_new:
            leaves = self._taken(leaves, tree, data, lowered)
        elif len(self.devices) > 1 and any(map(_is_deleted, leaves)):
            raise used_before("state")  # one device raises by itself, several would crash
        given, kept = lowered.shares.split(leaves)
        written, fetched, *finite = self._run(lowered.run, given, kept, data)
        if not finite:
            fetched, *finite = lowered.split(written, fetched)
        leaves = lowered.shares.updated(leaves, written)
        if self._held is not None:
            leaves = self._held.shown(leaves)
        self._returned = LastState(leaves)
        return _unflatten(tree, leaves), fetched, finite

    def _readable_leaves(
        self, state: Any, leaves: Sequence[Any], places: AbstractSet[int]
    ) -> Mapping[int, Any]:
        """Returns values of some leaves of a state, by place."""
        if self._held is not None:
            leaves = jax.tree_util.tree_leaves(self.pull(state))
        if any(_is_deleted(leaves[at]) for at in places if isinstance(leaves[at], jax.Array)):
            raise used_before("state")
        return {at: leaves[at] for at in places}

    def _spread(self, batch: Any) -> Any:
        shardings = self._example.lowered.batch_shardings
        cut = next((s for s in shardings if not s.is_fully_replicated), None)
        if cut is None or len(self.devices) == 1:
            return batch
        rows = NamedSharding(cut.mesh, PartitionSpec(cut.spec[0]))

        def placed(leaf: Any) -> Any:
            shape = np.shape(leaf)
            is_divisible = bool(shape) and shape[0] % len(self.devices) == 0
            return jax.device_put(leaf, rows) if is_divisible and not _is_wide(leaf) else leaf

        return jax.tree_util.tree_map(placed, batch)

    def pull(self, state: State) -> State:
        """Returns the state with a value for every leaf, as `TrainerStep.pull`.

        If devices train independently, that is the mean of their values.
        """
        if self._held is None:
            return state
        leaves, tree = _flatten(state)
        mean: State = _unflatten(tree, self._held.pulled(leaves))
        return mean

    def close(self) -> None:
        """Checks the last metrics and closes logs; `TrainerStep.close` also disconnects."""
        self._close_logs()
        self._finite.look()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def place(self, state: State) -> State:
        """Returns the state on the step's devices; a step does so itself when necessary."""
        if self._held is not None:
            return state  # its leaves go to different places, which a call determines
        leaves, tree = _flatten(state)
        placed: State = _unflatten(tree, self._taken(leaves, tree, (), self._example.lowered))
        return placed

    def _taken(
        self, leaves: Sequence[Any], tree: Any, data: Sequence[Any], lowered: LoweredStep
    ) -> list[Any]:
        """Validates and places a state that this step did not return itself."""
        check_state(leaves, tree, self.captured)
        given = lowered.shares.given
        return place_state(leaves, lowered.state_shardings, given=given, beside=data)

    @property
    def _speaks(self) -> bool:
        """Whether this process issues the warnings that all processes of a job would."""
        return True

    def _statistics(self) -> Mapping[str, Any]:
        numbers: dict[str, Any] = {"compilations": len(self._calls)}
        for name, store in self.tables.stores.items():
            numbers[f"table/{name}/rows"] = len(store)
        scale = self._held.newest(SCALE) if self._held is not None else None
        return numbers if scale is None else {**numbers, "loss_scale": scale}

    def _agreed(self, leaves: list[Any], _: Any) -> list[Any]:
        """Returns a new state in the form that all processes agree on."""
        return leaves

    def _whole(self, rows: int) -> int:
        """Returns the whole batch's number of rows for a call with this number."""
        return rows

    def _new_variant(self, data: list[Any], batch_tree: Any) -> Variant:
        rows = check_batch(data, batch_tree, self.captured, devices=len(self.devices))
        return self._variants.at(rows)

    def _placed(self, data: list[Any], lowered: LoweredStep) -> list[Any]:
        return place_batch(data, lowered.batch_shardings, state=self._returned)

    def _run(self, run: Any, given: Any, kept: Any, data: Any) -> Any:
        """Runs the step, and waits for it if steps must not overlap."""
        try:
            made = written, fetched, *_ = run(given, kept, data)
            if self._waits:
                jax.block_until_ready((fetched or written)[:1])  # all are ready together
            return made
        except (RuntimeError, ValueError) as error:
            if isinstance(error, JaxfleetError):
                raise
            if (mistake := mistake_in(error)) is None:
                raise
            raise mistake from error


def _is_wide(leaf: Any) -> bool:
    """Whether jax would truncate a leaf's integers to 32 bits: keys of tables have 64."""
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind in "iu" and leaf.dtype.itemsize == 8


def _shape_and_dtype(value: Any) -> tuple[Any, Any]:
    return np.shape(value), getattr(value, "dtype", type(value))


_is_deleted = operator.methodcaller("is_deleted")
_flatten = jax.tree_util.tree_flatten
_unflatten = jax.tree_util.tree_unflatten
