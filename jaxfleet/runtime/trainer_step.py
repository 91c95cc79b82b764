"""TrainerStep: a step of a parameter-server job, with the signature of the user's own."""

import operator
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict
from typing import Any, Self

import jax

from jaxfleet.capture import Captured
from jaxfleet.data import Batches, Loader
from jaxfleet.errors import FeedError, StrategyError
from jaxfleet.ir import Program
from jaxfleet.lower import ExecutableCache
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.remote_tables import table_stats
from jaxfleet.ps.membership import MembershipChangedError
from jaxfleet.runtime.evaluation import Evaluating
from jaxfleet.runtime.leased_batches import LeasedBatches
from jaxfleet.runtime.leaving import LeaveRequest
from jaxfleet.runtime.memory_report import fitting
from jaxfleet.runtime.metrics_log import Logging
from jaxfleet.runtime.nonfinite_watch import FiniteWatch
from jaxfleet.runtime.own_state import OwnStateKeeper
from jaxfleet.runtime.periodic_saves import PeriodicSaver
from jaxfleet.runtime.pserver_job import JobPrograms, example_of
from jaxfleet.runtime.remote_state import RemoteState
from jaxfleet.runtime.scalar_metrics import ScalarMetrics
from jaxfleet.runtime.step_inputs import compare_batches
from jaxfleet.runtime.step_state import Handle, NewestState
from jaxfleet.runtime.step_view import add_to_dump
from jaxfleet.runtime.trainer_batches import Programs, TrainerBatches
from jaxfleet.runtime.trainer_connection import TrainerConnection, TrainerSync
from jaxfleet.runtime.trainer_introspection import TrainerViews
from jaxfleet.runtime.trainer_membership import Scaling, check_trainer_lost
from jaxfleet.runtime.trainer_moves import TrainerMoves
from jaxfleet.runtime.trainer_tables import TrainerTables
from jaxfleet.runtime.trainer_timing import counters_of_servers
from jaxfleet.runtime.training_step import Metrics, State
from jaxfleet.strategy import DistributedStrategy
from jaxfleet.tables.host_lookup import specs_of

_AGES = frozenset({"bound", "max", "mean"})  # of the values that steps used


class TrainerStep(
    TrainerViews, TrainerMoves[State], TrainerTables, Logging, Evaluating[State, Metrics]
):
    """A step that runs on a trainer and updates on servers: `state, metrics = step(state, batch)`.

    Attributes:
        strategy: how it is distributed.
        captured: the one-device program.
        client: sends requests to the servers.
    """

    def __init__(
        self,
        captured: Captured,
        strategy: DistributedStrategy,
        programs: Programs,
        connect: Callable[[JobPrograms], Client],
        *,
        example: Program,
        cache: ExecutableCache | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        self.captured, self.strategy = captured, strategy
        self._cache = cache if cache is not None else ExecutableCache()
        self._scaling, self._joined, self._epoch_step = scaling, None, 0
        self._leaving = LeaveRequest(strategy.sigterm_grace_s)
        self._sent: tuple[list[Any], list[Any]] | None = None  # a state that is no step's result
        self._take(programs, example)
        if self._job.dumps.folder is not None:
            add_to_dump(self._job.dumps.folder, self._history())
        specs = specs_of(captured.program)
        check_trainer_lost(strategy)
        self._lines = TrainerConnection(
            lambda: self._enter(connect), lambda: self._pace, lambda: self._keeper, specs
        )
        self._newest = NewestState(captured)
        self._scalars = ScalarMetrics(is_shared=True)  # heartbeats report them
        self._finite = FiniteWatch(
            strategy.on_nonfinite,
            [captured.program.variables[leaf.name] for leaf in captured.signature.state],
            speaks=lambda: not self._pace.is_sync or self.client.me.trainer == 0,
            of_own=True,
            waits=lambda: self._pace.is_sync,
        )
        self._saver: PeriodicSaver | None = None
        self._has_run = False
        # Only in sync mode do all trainers reach their first steps together.
        self._compares = (
            self._pace.is_sync and strategy.batch == "global" and self._job.trainers > 1
        )

    def _take(self, programs: Programs, example: Program) -> None:
        """Takes the programs of a place in the job, and what is made of them."""
        captured, strategy, cache = self.captured, self.strategy, self._cache
        programs = fitting(programs, strategy, captured.signature.rows, cache)
        self._job = programs(example)
        self._pace = TrainerSync(self._job.trainer, cache)
        self._batches = TrainerBatches(
            captured, self._job, example, is_local=strategy.batch == "local",
            programs=programs, pace=self._pace,
        )  # fmt: skip
        self._served = RemoteState(captured, self._job)
        waits, is_sync = strategy.returns_s is not None, self._pace.is_sync
        self._keeper = OwnStateKeeper(
            self._served,
            waits=waits,
            is_sync=is_sync,
            at_exchanges=self._pace.counts_exchanges,
        )

    def _take_programs(self, programs: Programs, trainers: int) -> None:
        self._take(programs, example_of(self.captured, self.strategy, trainers))

    def _prepared(self, client: Client) -> Client:
        """Returns a client whose heartbeats report this step's scalar metrics."""
        client.publish(self._newest_scalars)
        self._time_steps(client)
        return self._as_member(client)

    def _newest_scalars(self) -> tuple[int, Mapping[str, float]]:
        newest = self._scalars.latest()
        return newest.step, newest.values

    @property
    def client(self) -> Client:
        """The client of the servers, connected on first use."""
        return self._lines.client

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """Runs one step.

        Args:
            state: as for `train_step`, or as returned by the last step. Other values are sent to
                the servers first, at the same step on all trainers.
            batch: the whole batch, or this trainer's rows if the strategy's batch is `local`.

        Returns:
            The results of `train_step`; state that only servers hold is returned as handles.

        Raises:
            FeedError: the state or the batch does not match the example.
            PeerLostError: a server, or another trainer, is gone or late.
        """
        leaves, tree = jax.tree_util.tree_flatten(state)
        data, rows = self._batches.check(batch)
        self._before_call()
        if self._leaving.is_made:
            self._leave()
        leaves = self._at_its_servers(leaves)
        metrics = self._through_changes(
            lambda: self._computed(leaves, tree, data, rows), trains=True
        )
        state = jax.tree_util.tree_unflatten(tree, self._newest.leaves)
        self._through_changes(self._save_own)
        if self._saver is not None:
            self._saver.after_step(state, self.client.step if self._pace.is_sync else None)
        return state, metrics

    def _computed(self, leaves: list[Any], tree: Any, data: list[Any], rows: int) -> Metrics:
        """Computes one step; if it is interrupted, as if it had not begun."""
        client = self.client
        done = client.step
        try:
            return self._compute(client, leaves, tree, data, rows)
        except MembershipChangedError:
            client.step = done
            raise

    def _save_own(self) -> None:
        self._served.save_own(self.client, is_sync=self._pace.is_sync)

    def _compute(
        self, client: Client, leaves: list[Any], tree: Any, data: list[Any], rows: int
    ) -> Metrics:
        variant = self._batches.variant(rows, client, self._lines.trained)
        leaves = self._given(leaves, tree)
        if self._compares:
            self._compares = False
            compare_batches(client, data)
        self._keeper.begin_step(client)
        fresh = self._pace.begin(client, self._batches.whole(rows))
        client.doing(f"step {client.step}")
        client.leases.train()
        with client.spans.span("step", step=client.step, rows=rows):
            new, fetched = variant.run({**self._served.held(leaves), **fresh}, data, rows)
            new.update(self._pace.end(new, rows // variant.sharers))
        self._has_run, self._sent = True, None
        self._newest.leaves = self._served.leaves(new)
        self._keeper.end_step(client, self._newest.leaves)
        metrics: Metrics = jax.tree_util.tree_unflatten(variant.captured.metrics_tree, fetched)
        self._scalars.note(fetched, variant.captured.metrics, at_least=client.step)
        finite = variant.trainer.finite
        self._finite.note(fetched, variant.captured.metrics_tree, self._newest.leaves, finite)
        return metrics

    def pull(self, state: State) -> State:
        """Returns the state with values instead of handles.

        Args:
            state: the result of the last step.

        Raises:
            FeedError: it is older: servers hold only the newest.
        """
        leaves, tree = jax.tree_util.tree_flatten(state)
        values = self._readable_leaves(state, leaves, set(range(len(leaves))))
        full = [values[at] for at in range(len(leaves))]
        pulled: State = jax.tree_util.tree_unflatten(tree, full)
        return pulled

    def _readable_leaves(
        self, state: Any, leaves: Sequence[Any], places: AbstractSet[int]
    ) -> Mapping[int, Any]:
        """Returns values of some leaves of the newest state, by place; servers' values first."""
        del state
        if not self._newest.is_made_of(leaves):
            what = "the state is not what the last step returned, and servers hold only the newest"
            raise FeedError(what, hint="pull the state that step(...) returned last")
        names = {at: leaf.name for at, leaf in enumerate(self.captured.signature.state)
                 if at in places}  # fmt: skip
        wanted = [name for at, name in names.items() if isinstance(leaves[at], Handle)]
        self._pace.flush()
        if not self._pace.is_sync:  # this trainer's last received values may be older
            wanted += [name for name in self._served.params if name in set(names.values())]
        values: Mapping[str, Any] = {}
        if wanted:
            values = self._through_changes(lambda: self._served.pull(self.client, wanted))
        return {at: values.get(name, leaves[at]) for at, name in names.items()}

    def batches(self, loader: Loader, done: int = 0) -> Batches | LeasedBatches:
        """Returns the batches of a loader for this trainer's steps.

        If trainers wait for each other, they are those after `done` steps. In the other modes
        trainers lease samples from server 0, so that each is trained on once, whichever trainer is
        lost: the position is the servers', and comes with a checkpoint that is restored.

        Args:
            loader: with `batch="local"` where trainers lease.
            done: the number of steps that led to the state. Where trainers lease, it counts if the
                job begins without a position.

        Raises:
            StrategyError: trainers lease samples, and the step or the loader has global batches.
        """
        if self._pace.is_sync or self._pace.counts_exchanges:
            return loader.from_step(done)
        if self.strategy.batch != "local" or not loader.is_local:
            what = f"trainers lease samples in the mode '{self.strategy.communication}', and"
            which = "the loader's" if self.strategy.batch == "local" else "the strategy's"
            hint = "write batch='local' for both: every trainer trains on samples of its own"
            raise StrategyError(f"{what} {which} batch is 'global'", hint=hint)
        return LeasedBatches(
            loader,
            self._current_client,
            flush=self._flush,
            advance=self._advance,
            done=done,
        )

    def _flush(self) -> None:
        self._pace.flush()

    def _advance(self, level: int) -> None:
        """Goes on to a step without gradients, and takes part in the periodic checkpoints."""
        while self.client.step < level:
            self._pace.idle(self.client)
            if self._saver is not None and self._newest.leaves:
                tree = self.captured.signature.state_tree
                state = jax.tree_util.tree_unflatten(tree, self._newest.leaves)
                self._saver.after_step(state)

    def stats(self) -> dict[str, Any]:
        """Returns counters of this process, of every server, and of tables over all servers.

        By `trainer`, `servers` (a list), `tables` (by name), and `data`: where trainers lease
        samples, how many were trained on once, twice and never, by epoch.
        """
        return self._through_changes(self._counted)

    def _counted(self) -> dict[str, Any]:
        client = self.client
        mine = {
            "step": client.step,
            "sent_bytes": client.sent_bytes,
            "received_bytes": client.received_bytes,
            **asdict(self._batches.copies),
            **self._pace.stats(),
        }
        servers = counters_of_servers(client)
        tables, data = table_stats(servers), servers[0].get("data", {})
        return {"trainer": mine, "servers": servers, "tables": tables, "data": data}

    def _statistics(self) -> Mapping[str, Any]:
        found = {
            "compilations": self._cache.compiled,
            "sent_bytes": self.client.sent_bytes,
            "received_bytes": self.client.received_bytes,
        }
        staleness = self._pace.stats().get("staleness", {})
        return found | {f"staleness/{key}": staleness[key] for key in staleness.keys() & _AGES}

    def place(self, state: State) -> State:
        """Returns the state unchanged: the first step sends the servers their part."""
        return state

    def close(self) -> None:
        """Disconnects this trainer from the servers, which end when all trainers have."""
        self._close_logs()
        self._finite.look(self._newest.leaves)
        self._leaving.stop()
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.close()
        else:
            self._close_logs()
            self._leaving.stop()
            self._lines.abandon()

    def _given(self, leaves: list[Any], tree: Any) -> list[Any]:
        """Returns a state whose values the servers have, after sending them missing ones."""
        newest = self._newest
        if newest.is_made_of(leaves):
            return leaves
        sent = self._sent  # by this step, before it was interrupted
        if sent is not None and all(map(operator.is_, sent[0], leaves)):
            return sent[1]
        newest.check(leaves, tree)
        if not newest.leaves:
            self._refuse_another_state()
        changed = [(place, leaves[place]) for place in newest.places_of_others(leaves)]
        self._pace.flush()
        came = self._pace.take()
        fresh = self._served.assign(self.client, changed, replace=bool(newest.leaves))
        names = [leaf.name for leaf in self.captured.signature.state]
        found = [
            fresh.get(place, came.get(name, leaf))
            for place, (name, leaf) in enumerate(zip(names, leaves, strict=True))
        ]
        self._pace.restart(self._served.held(found))
        self._keeper.keep(self.client, found)
        self._sent = list(leaves), found
        return found
