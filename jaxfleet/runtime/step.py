"""Step: a distributed training step, with the signature of the user's own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxfleet.capture import Captured, capture
from jaxfleet.capture.trees import spec_of
from jaxfleet.errors import FeedError
from jaxfleet.ir import Program
from jaxfleet.lower import Interface, LoweredStep, lower_step
from jaxfleet.pipeline import Record
from jaxfleet.runtime.devices import choose_devices, steps_must_not_overlap
from jaxfleet.runtime.explain import explain
from jaxfleet.runtime.strategy import DistributedStrategy, as_strategy
from jaxfleet.runtime.transpile import pipeline_for, transpile


def distribute(
    train_step: Callable[[Any, Any], tuple[Any, Any]],
    example: tuple[Any, Any],
    strategy: DistributedStrategy | str | None = None,
    *,
    dump_dir: str | Path | None = None,
    name: str | None = None,
) -> "Step":
    """Compiles a one-device training step into a distributed one.

    The result computes what the step computes on one device with the whole batch: sums over the
    batch are completed over all devices wherever the program needs them complete.

    Args:
        train_step: takes `(state, batch)` and returns `(state, metrics)`. Its optimizer is wrapped
            in `distributed_optimizer`.
        example: a state and a batch, or their types. Axis 0 of every batch leaf that has one is
            the global batch.
        strategy: a `DistributedStrategy`, or the name of a mode; `collective` unless given.
        dump_dir: a directory for dumps of what every pass did.
        name: the program's name; the function's, unless given.

    Raises:
        CaptureError: the step cannot be captured.
        StrategyError: the strategy does not fit the machine.
        FeedError: the example's batch cannot be divided among the devices.
    """
    chosen = as_strategy(strategy)
    devices = choose_devices(1 if chosen.mode == "single" else chosen.devices)
    captured = capture(train_step, example=example, name=name)
    folder = Path(dump_dir) if dump_dir is not None else None
    return Step(captured, chosen, devices, folder)


@dataclass(frozen=True)
class Variant:
    """The step for one way the batch is captured: for all sizes, or for one."""

    program: Program
    dumps: Record
    lowered: LoweredStep


class Step:
    """A distributed training step: `state, metrics = step(state, batch)`.

    Attributes:
        strategy: how it is distributed.
        devices: what it runs on.
        captured: the one-device program.
    """

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
        self._dump_dir = dump_dir
        self._waits = steps_must_not_overlap(self.devices)
        self._variants: dict[int | None, Variant] = {}
        self._known: dict[tuple[Any, ...], Variant] = {}
        self._analysed: Any = None
        check_rows(captured.signature.rows, len(self.devices))
        self._example = self._variant(captured.signature.rows)

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Runs one step.

        Args:
            state: as `train_step` takes it; its memory is reused unless the strategy says not.
            batch: the global batch; any number of rows that the devices can share.

        Returns:
            What `train_step` returns: the new state and the metrics, complete over all devices.

        Raises:
            FeedError: the state or the batch is not like the example.
        """
        leaves, tree = jax.tree_util.tree_flatten(batch)
        key = (tree, *map(np.shape, leaves))
        variant = self._known.get(key)
        if variant is None:
            variant = self._known[key] = self._variant(self._rows_of(leaves, tree))
        result: tuple[Any, Any] = self._run(variant.lowered, state, batch)
        if self._waits:
            jax.block_until_ready(_one_leaf(result))
        return result

    @property
    def program(self) -> Program:
        """The transpiled program."""
        return self._example.program

    @property
    def dumps(self) -> Record:
        """What every pass did; index it by number or by a pass's name."""
        return self._example.dumps

    @property
    def compiled(self) -> Any:
        """The jitted function under the step, with the same signature."""
        return self._example.lowered.function

    def lower(self, state: Any = None, batch: Any = None) -> Any:
        """Returns jax's `Lowered` of the step, for the example's types unless given others."""
        if state is None or batch is None:
            state, batch = self.example_types()
        return self.compiled.lower(state, batch)

    def example_types(self) -> tuple[Any, Any]:
        """Returns the types of the example's state and batch, as jax's `ShapeDtypeStruct`s."""
        signature, unflatten = self.captured.signature, jax.tree_util.tree_unflatten
        state = unflatten(signature.state_tree, [spec_of(leaf) for leaf in signature.state])
        batch = unflatten(signature.batch_tree, [spec_of(leaf) for leaf in signature.batch])
        return state, batch

    def memory_analysis(self) -> Any:
        """Returns XLA's memory analysis of the compiled step, in bytes, of one device."""
        return self._executable().memory_analysis()

    def cost_analysis(self) -> Any:
        """Returns XLA's cost analysis of the compiled step: flops and bytes of one device."""
        return self._executable().cost_analysis()

    def as_text(self) -> str:
        """Returns the optimized HLO of the compiled step."""
        return str(self._executable().as_text())

    def explain(self) -> str:
        """Returns about twenty lines on what was decided, and why."""
        return explain(self.captured, self.strategy, self.devices, self.program, self.dumps)

    def place(self, state: Any) -> Any:
        """Returns the state on the step's devices; a step does so itself when it has to."""
        sharding = self._example.lowered.state_sharding
        return state if sharding is None else jax.device_put(state, sharding)

    def __repr__(self) -> str:
        mode, count = self.strategy.mode, len(self.devices)
        return f"Step('{self.program.name}', mode='{mode}', devices={count})"

    def _variant(self, rows: int) -> Variant:
        captured = self.captured.at(rows)
        if captured.rows not in self._variants:
            passes = pipeline_for(self.strategy, devices=len(self.devices))
            program, record = transpile(captured.program, passes, dump_dir=self._dump_dir)
            lowered = lower_step(
                program,
                _interface(captured),
                devices=self.devices,
                lowering=self.strategy.lowering,
                donate=self.strategy.donate,
            )
            self._variants[captured.rows] = Variant(program, record, lowered)
        return self._variants[captured.rows]

    def _rows_of(self, leaves: Sequence[Any], tree: Any) -> int:
        """Returns the rows of a batch that was not seen before, once it is found to be good."""
        signature = self.captured.signature
        if tree != signature.batch_tree:
            what = f"the batch has another structure than the example: {tree}"
            raise FeedError(what, hint=f"the example's is {signature.batch_tree}")
        rows = {}
        for leaf, value in zip(signature.batch, leaves, strict=True):
            shape = np.shape(value)
            if len(shape) != len(leaf.shape) or shape[1:] != leaf.shape[1:]:
                what = f"'{leaf.name}' has shape {list(shape)}, in the example {list(leaf.shape)}"
                raise FeedError(what, hint="only the number of rows may change")
            if shape:
                rows[shape[0]] = leaf.name
        if len(rows) > 1:
            listed = ", ".join(f"'{name}' has {count}" for count, name in rows.items())
            raise FeedError(f"the batch's leaves differ in their rows: {listed}")
        count = next(iter(rows))
        check_rows(count, len(self.devices))
        return count

    def _run(self, lowered: LoweredStep, state: Any, batch: Any) -> Any:
        try:
            return lowered.function(state, batch)
        except FeedError:
            raise
        except ValueError:
            if lowered.state_sharding is None:
                raise
            # A state that a checkpoint or another step committed elsewhere: jit refuses to move it.
            placed = jax.device_put(batch, lowered.batch_shardings)
            return lowered.function(self.place(state), placed)
        except RuntimeError as error:
            if "deleted" not in str(error):
                raise
            what = "the state was used before: the last step took its memory"
            hint = "write state, metrics = step(state, batch), or set strategy.donate=False"
            raise FeedError(what, hint=hint) from error

    def _executable(self) -> Any:
        if self._analysed is None:
            self._analysed = self.lower().compile()
        return self._analysed


def check_rows(rows: int, devices: int) -> None:
    """Refuses a batch that the devices cannot share.

    Raises:
        FeedError: the rows are no multiple of the devices.
    """
    if rows % devices:
        what = f"a batch of {rows} rows cannot be divided among {devices} devices"
        near = f"{rows - rows % devices} or {rows + devices - rows % devices}"
        raise FeedError(what, hint=f"use a multiple of {devices}, such as {near}")


def _interface(captured: Captured) -> Interface:
    signature = captured.signature
    return Interface(
        tuple(leaf.name for leaf in signature.state),
        tuple(leaf.name for leaf in signature.batch),
        captured.metrics,
        signature.state_tree,
        signature.batch_tree,
        captured.metrics_tree,
    )


def _one_leaf(result: tuple[Any, Any]) -> Any:
    """Returns one array of a step's result; when it is ready, so are all."""
    state, metrics = result
    leaves = jax.tree_util.tree_leaves(metrics) or jax.tree_util.tree_leaves(state)
    return leaves[:1]
