"""RankStep: a step that runs over the devices of all ranks of a group, one process each."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxfleet.capture import Captured
from jaxfleet.checkpoint import Checkpoint
from jaxfleet.cluster import ProcessGroup
from jaxfleet.cluster.global_arrays import (
    digest,
    local_rows,
    of_each_rank,
    of_rank_0,
    on_all_ranks,
    whole_array,
)
from jaxfleet.cluster.group_view import CHANGED_STATE
from jaxfleet.errors import CheckpointError, StrategyError, UnsupportedError
from jaxfleet.lower import LoweredStep
from jaxfleet.runtime.compiled_variants import Variant
from jaxfleet.runtime.scalar_metrics import ScalarMetrics
from jaxfleet.runtime.step import Step
from jaxfleet.runtime.step_inputs import check_batch, check_state, description, warn_of_own_batches
from jaxfleet.runtime.step_state import LastState
from jaxfleet.runtime.training_step import Metrics, State
from jaxfleet.strategy import DistributedStrategy

_SHOWN = 6  # leaves of a state, in an error


class RankStep(Step[State, Metrics]):
    """One rank's end of a step that all ranks run together.

    Each call runs on the devices of all. Before the first, and before the first with a batch of
    another shape, the ranks compare their programs and shapes. The state of the first call is rank
    0's.

    Args:
        captured: the one-device program.
        strategy: how it is distributed.
        joined: this rank.
        dump_dir: where passes are dumped.
    """

    _whole_trees = False  # the group's own thread runs the step, and may wait for other ranks
    _shares_scalars = True  # the metrics server's thread reads them

    def __init__(
        self,
        captured: Captured,
        strategy: DistributedStrategy,
        joined: ProcessGroup,
        dump_dir: Path | None = None,
    ) -> None:
        self._joined = joined
        joined.wait_less(lost_after_s=strategy.lost_after_s, step_timeout_s=strategy.step_timeout_s)
        self._is_local = strategy.batch == "local"
        self._has_begun = False
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._digests: dict[int, str] = {}  # agreed by ranks, by the whole batch's rows
        _check(strategy, captured)
        super().__init__(captured, strategy, jax.devices(), dump_dir)
        self._waits = False  # here, and not inside XLA
        joined.counts.scalars = partial(_newest, self._scalars)

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """Runs one step, together with all ranks.

        Args:
            state: as for `train_step`; at the first call, rank 0's is used.
            batch: the global batch, of which this rank takes its rows; this rank's own rows if the
                strategy's batch is `local`.

        Returns:
            The results of `train_step`: the new state and the metrics, complete over all ranks. A
            metric with the batch's axis has all rows; this rank's if the batch is `local`.

        Raises:
            FeedError: the state or the batch does not match the example.
            PeerLostError: another rank is gone, or late.
            ProgramError: another rank runs another program, or has a batch of another shape.
        """
        self._joined.next_step()
        return super().__call__(state, batch)

    def save(
        self,
        path: str | Path,
        state: State,
        *,
        number: int = 0,
        data: Mapping[str, int] | None = None,
    ) -> None:
        """Writes a checkpoint from rank 0, and waits until it is complete; collective.

        Raises:
            CheckpointError: rank 0 cannot write it.
            PeerLostError: another rank is gone, or late.
        """
        super().save(path, state, number=number, data=data)

    def restore(self, path: str | Path) -> State:
        """Returns the state of a checkpoint, which every rank reads; collective.

        Raises:
            CheckpointError: a rank finds none, or another one; it is damaged, or of another step.
            PeerLostError: another rank is gone, or late.
        """
        self._has_begun = True  # all have the checkpoint's state, so rank 0 need not send its own
        state = super().restore(path)
        self._returned = LastState(jax.tree_util.tree_leaves(state))
        return state

    def pull(self, state: State) -> State:
        """Returns the state with all of it readable on every rank.

        Collective if any leaf is sharded over the ranks, or has a value per rank.

        Raises:
            PeerLostError: another rank is gone, or late.
            ProgramError: another rank performs another operation.
        """
        leaves = jax.tree_util.tree_leaves(state)
        if self._held is None and all(map(_is_readable, leaves)):
            return state
        what = "pulling the state"
        self._joined.barrier(what, timeout_s=self._longest_s)
        if self._held is not None:
            state = self._together(what, partial(super().pull, state))
        whole: State = jax.tree_util.tree_map(self._whole_leaf, state)
        return whole

    def _readable_leaves(
        self, state: Any, leaves: Sequence[Any], places: AbstractSet[int]
    ) -> Mapping[int, Any]:
        """Returns values on one device of this rank, so that a rank may evaluate alone.

        Collective if any of the leaves is sharded over the ranks, or has a value per rank.
        """
        found: Mapping[int, Any] = {at: leaves[at] for at in places}
        if self._held is not None or not all(map(_is_readable, found.values())):
            found = super()._readable_leaves(self.pull(state), leaves, places)
        return {at: _on_one_device(leaf) for at, leaf in found.items()}

    def _spread(self, batch: Any) -> Any:
        return batch

    def _extra(self) -> Mapping[str, np.ndarray]:
        if self._held is None:
            return {}
        extra: Mapping[str, np.ndarray] = self._together("saving", super()._extra)
        return extra

    def _together(self, what: str, compute: Callable[[], Any]) -> Any:
        """Returns the result of a collective computation, for which this rank may wait."""
        return self._joined.run(
            what, lambda: jax.block_until_ready(compute()), timeout_s=self._longest_s
        )

    def _write(
        self,
        path: str | Path,
        leaves: list[Any],
        extra: Mapping[str, np.ndarray],
        number: int,
        data: Mapping[str, int] | None,
    ) -> None:
        whole, error = [self._whole_leaf(leaf) for leaf in leaves], None
        if self._joined.rank == 0:
            try:
                super()._write(path, whole, extra, number, data)
                self._joined.counts.saves += 1
            except (CheckpointError, OSError) as found:
                error = found
        told = self._tell(f"saving to {path}", str(error or ""))[0]
        if error is not None:
            raise error
        if told:
            raise CheckpointError(f"rank 0: {told}", hint="its log has more")

    def _opened(self, path: str | Path) -> Checkpoint:
        found, said = None, ""
        try:
            found = super()._opened(path)
            # Files of one step may still differ, if a machine has an old one of its own.
            said = f"found that of step {found.step}, {found.sha256[:8]}"
        except CheckpointError as error:
            said = str(error)
            self._tell(f"restoring {path}", said)
            raise
        told = self._tell(f"restoring {path}", said)
        for rank, other in enumerate(told):
            if other != said:
                what = f"rank {rank}: {other}; and rank {self._joined.rank} {said}"
                raise CheckpointError(what, hint="give all ranks one folder that all can read")
        return found

    def _tell(self, what: str, said: str) -> list[str]:
        """Exchanges a text with all ranks; returns each rank's."""
        told = self._joined.gather(what, said.encode(), timeout_s=self._longest_s)
        return [each.decode() for each in told]

    def _agreed_number(self, what: str, number: int, error: Exception | None) -> int:
        told, _, failure = self._tell(what, f"{number} {error or ''}")[0].partition(" ")
        if error is not None:
            raise error
        if failure:
            raise CheckpointError(f"rank 0 could not {what}: {failure}", hint="its log has more")
        return int(told)

    def _whole_leaf(self, leaf: Any) -> Any:
        if _is_readable(leaf):
            return leaf
        return whole_array(self._joined, leaf, timeout_s=self._longest_s)

    @property
    def _speaks(self) -> bool:
        return self._joined.rank == 0

    @property
    def _longest_s(self) -> float:
        return self.strategy.step_timeout_s

    def _whole(self, rows: int) -> int:
        return rows * self._joined.size if self._is_local else rows

    def _named(self, rows: int) -> str:
        """Names this rank's computation to others, for a call with this number of rows."""
        return f"{self.program.name} with {rows} rows{' of each rank' if self._is_local else ''}"

    def _new_variant(self, data: list[Any], batch_tree: Any) -> Variant:
        shares = jax.local_device_count() if self._is_local else len(self.devices)
        rows = check_batch(data, batch_tree, self.captured, devices=shares)
        self._joined.doing("compiling")
        variant = self._variants.at(self._whole(rows))
        lines = description(self.strategy, self.captured, variant.program, data)
        what = self._named(rows)
        digest_of = self._joined.agree(what, lines, timeout_s=self._longest_s)
        self._digests[self._whole(rows)] = digest_of
        if not self._is_local:
            told = self._tell("comparing batches", " ".join(map(digest, data)))
            warn_of_own_batches(told)
        return variant

    def _placed(self, data: list[Any], lowered: LoweredStep) -> list[Any]:
        make = of_each_rank if self._is_local else on_all_ranks
        pairs = zip(data, lowered.batch_shardings, strict=True)
        return [make(value, sharding) for value, sharding in pairs]

    def _agreed(self, leaves: list[Any], tree: Any) -> list[Any]:
        if self._held is None or not self._has_begun:  # else it has handles, and is checked later
            check_state(leaves, tree, self.captured)
        if self._has_begun:
            self._agree_on(leaves)
            return leaves
        self._has_begun = True
        return of_rank_0(self._joined, leaves, timeout_s=self._longest_s)

    def _agree_on(self, leaves: Sequence[Any]) -> None:
        """Rejects user changes to the state that differ between ranks."""
        names = [leaf.name for leaf in self.captured.signature.state]
        pairs = zip(names, leaves, strict=True)
        changed = [(name, leaf) for name, leaf in pairs if leaf not in self._returned]
        lines = [f"'{name}' is {digest(leaf)}" for name, leaf in changed]
        shown = ", ".join(name for name, _ in changed[:_SHOWN])
        more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        what = f"{CHANGED_STATE}: {shown}{more}"
        self._joined.agree(what, lines, timeout_s=self._longest_s)

    def _run(self, run: Any, given: Any, kept: Any, data: Any) -> Any:
        rows = next((x.shape[0] for x in data if x.ndim), 0)
        runs = self._named(rows // self._joined.size if self._is_local else rows)
        known = (id(run), *map(np.shape, data))
        if known not in self._compiled:
            self._compiled[known] = self._compile(run, given, kept, data)
        compute = partial(super()._run, self._compiled[known], given, kept, data)
        written, fetched, *finite = self._joined.run_step(
            runs, compute, timeout_s=self._longest_s, digest=self._digests.get(rows, "")
        )
        return written, [self._readable(value) for value in fetched], *finite

    def _compile(self, run: Any, given: Any, kept: Any, data: Any) -> Any:
        """Compiles a step here, not in the thread that is to run it."""
        return run.lower(given, kept, data).compile() if hasattr(run, "lower") else run

    def _readable(self, value: jax.Array) -> jax.Array:
        """Returns a metric in a form that this rank can read."""
        if value.is_fully_replicated:
            return value
        if self._is_local:
            return local_rows(value)
        return whole_array(self._joined, value, timeout_s=self._longest_s)


def _newest(scalars: ScalarMetrics) -> tuple[int, Mapping[str, float]]:
    """Returns the newest scalars and their step; does not refer to the step, which may be large."""
    found = scalars.latest()
    return found.step, found.values


def _is_readable(leaf: Any) -> bool:
    """Whether this rank can read the whole leaf."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated


def _on_one_device(leaf: Any) -> Any:
    is_array = isinstance(leaf, jax.Array)
    return leaf.addressable_data(0) if is_array and leaf.is_fully_replicated else leaf


def _check(strategy: DistributedStrategy, captured: Captured) -> None:
    """Rejects options that work in a single process only."""
    if strategy.devices not in {None, len(jax.devices())}:
        what = f"strategy: {strategy.devices} devices, and the group has {len(jax.devices())}"
        raise StrategyError(what, hint="leave devices out: a step runs on those of all ranks")
    counts = Counter(device.process_index for device in jax.devices())
    if strategy.batch == "local" and len(set(counts.values())) > 1:
        said = ", ".join(f"rank {rank} has {counts[rank]}" for rank in sorted(counts))
        what = f"strategy: batch 'local', and ranks have unequal devices: {said}"
        raise StrategyError(what, hint="give each rank as many devices, or use batch='global'")
    if strategy.lowering != "shard_map":
        what = f"strategy: lowering {strategy.lowering!r} over several processes"
        raise UnsupportedError(what, hint="use lowering='shard_map'")
    if "tables" in captured.program.attrs:
        what = "a step that looks up tables cannot run over several processes without servers"
        raise UnsupportedError(what, hint="use mode='pserver': servers hold the tables' rows")
    if strategy.memory_budget is not None:
        what = "strategy: memory_budget over several processes"
        raise UnsupportedError(what, hint="leave it out: plans are made by what one process finds")
