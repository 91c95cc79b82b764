"""TrainerStep: a step of a parameter-server job, with the signature of the user's own."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from jaxfleet.capture import Captured
from jaxfleet.env import PeriodicSaves
from jaxfleet.errors import FeedError, StrategyError
from jaxfleet.ir import Program
from jaxfleet.lower import ExecutableCache
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.former_process import FormerProcess
from jaxfleet.ps.client.remote_tables import RemoteTables, table_stats
from jaxfleet.runtime.evaluation import Evaluating
from jaxfleet.runtime.memory_report import fitting
from jaxfleet.runtime.metrics_log import Logging
from jaxfleet.runtime.nonfinite_watch import FiniteWatch
from jaxfleet.runtime.own_state import OwnStateKeeper
from jaxfleet.runtime.periodic_saves import PeriodicSaver
from jaxfleet.runtime.pserver_checkpoint import (
    agree,
    export_table,
    meet,
    restore_job,
    save_job,
    shrink_table,
)
from jaxfleet.runtime.pserver_job import JobPrograms
from jaxfleet.runtime.remote_state import RemoteState
from jaxfleet.runtime.scalar_metrics import ScalarMetrics
from jaxfleet.runtime.step_inputs import compare_batches
from jaxfleet.runtime.step_state import Handle, NewestState
from jaxfleet.runtime.step_view import add_to_dump
from jaxfleet.runtime.trainer_batches import Programs, TrainerBatches
from jaxfleet.runtime.trainer_connection import TrainerConnection, TrainerSync
from jaxfleet.runtime.trainer_introspection import TrainerViews
from jaxfleet.runtime.training_step import Metrics, State
from jaxfleet.runtime.transpile import end_if_only_dumping
from jaxfleet.strategy import DistributedStrategy
from jaxfleet.tables.host_lookup import looked_up, specs_of
from jaxfleet.transport.messages import Kind

_NO_RETURN = (
    "trainers do not come back to jobs with tables; `jaxfleet launch --max-restarts N --save-every "
    "5m` starts the job again, from its last checkpoint, which step.resume returns"
)
_AGES = frozenset({"bound", "max", "mean"})  # of the values that steps used


class TrainerStep(TrainerViews, Logging, Evaluating[State, Metrics]):
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
    ) -> None:
        self.captured, self.strategy = captured, strategy
        self._cache = cache = cache if cache is not None else ExecutableCache()
        programs = fitting(programs, strategy, captured.signature.rows, cache)
        self._job = programs(example)
        if self._job.dumps.folder is not None:
            add_to_dump(self._job.dumps.folder, self._history())
        self._pace = TrainerSync(self._job.trainer, cache)
        self._batches = TrainerBatches(
            captured, self._job, example, is_local=strategy.batch == "local",
            programs=programs, pace=self._pace,
        )  # fmt: skip
        specs = specs_of(captured.program)
        if specs and strategy.returns_s is not None:
            what = f"on_trainer_lost='wait' with a step that looks up '{specs[0].name}'"
            raise StrategyError(what, hint=_NO_RETURN)
        self._lines = TrainerConnection(lambda: self._connected(connect), self._pace, specs)
        self._served = RemoteState(captured, self._job)
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
        self._keeper = OwnStateKeeper(self._served, waits=strategy.returns_s is not None)
        self._has_run = False
        # Only in sync mode do all trainers reach their first steps together.
        self._compares = (
            self._pace.is_sync and strategy.batch == "global" and self._job.trainers > 1
        )

    def _connected(self, connect: Callable[[JobPrograms], Client]) -> Client:
        """Returns a client whose heartbeats report this step's scalar metrics."""
        client = connect(self._job)
        client.publish(self._newest_scalars)
        return client

    def _newest_scalars(self) -> tuple[int, Mapping[str, float]]:
        newest = self._scalars.latest()
        return newest.step, newest.values

    @property
    def client(self) -> Client:
        """The client of the servers, connected on first use."""
        return self._lines.client

    @property
    def tables(self) -> RemoteTables:
        return self._lines.tables

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
        end_if_only_dumping()
        client = self.client
        variant = self._batches.variant(rows, client, self._lines.trained)
        leaves = self._given(leaves, tree)
        if self._compares:
            self._compares = False
            compare_batches(client, data)
        self._keeper.settle(client)
        fresh = self._pace.begin(client, self._batches.whole(rows))
        client.doing(f"step {client.step}")
        with client.spans.span("step", step=client.step, rows=rows):
            new, fetched = variant.run({**self._served.held(leaves), **fresh}, data, rows)
            new.update(self._pace.end(new, rows // variant.sharers))
        self._has_run = True
        self._newest.leaves = self._served.leaves(new)
        self._keeper.keep(client, self._newest.leaves)
        metrics = jax.tree_util.tree_unflatten(variant.captured.metrics_tree, fetched)
        self._scalars.note(fetched, variant.captured.metrics, at_least=client.step)
        self._served.save_own(client, is_sync=self._pace.is_sync)
        finite = variant.trainer.finite
        self._finite.note(fetched, variant.captured.metrics_tree, self._newest.leaves, finite)
        state = jax.tree_util.tree_unflatten(tree, self._newest.leaves)
        if self._saver is not None:
            self._saver.after_step(state, client.step if self._pace.is_sync else None)
        return state, metrics

    def save_periodically(self, saves: PeriodicSaves) -> None:
        """Lets the following steps write checkpoints by themselves.

        Raises:
            StrategyError: the interval is in seconds, and trainers do not wait for each other.
        """
        if not self._pace.is_sync and saves.every.seconds is not None:
            what = (
                f"checkpoints every {saves.every}, and with communication "
                f"'{self.strategy.communication}' no step is that of all trainers"
            )
            raise StrategyError(what, hint="count steps of each trainer: --save-every 500steps")
        self._saver = PeriodicSaver(
            saves,
            self.captured.program.name,
            save=lambda path, state, _: self.save(path, state),
            agree=lambda what, number, error: agree(self.client, what, error, number),
            is_first=lambda: self._is_first,
        )

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
        values = self._served.pull(self.client, wanted) if wanted else {}
        return {at: values.get(name, leaves[at]) for at, name in names.items()}

    def look_up(self, table: str, keys: Any) -> np.ndarray:
        """Returns rows of a table as of the last step, as `Step.look_up`; not collective.

        Raises:
            FeedError: `keys` are not valid keys.
            ProgramError: the step does not look up this table.
            PeerLostError: a server is gone or late.
        """
        return looked_up(self.tables, table, np.asarray(keys))

    def shrink(self, table: str) -> int:
        """Evicts rows of a table, as `Step.shrink`; collective, after the same number of steps.

        Raises:
            ProgramError: the step does not look up this table.
            PeerLostError: a server, or another trainer, is gone or late.
        """
        what = self._pause(f"shrink '{table}'")
        return shrink_table(self.client, self.tables, table, what)

    def export(self, table: str, folder: str | Path, *, text: bool = False) -> int:
        """Exports a table's rows, as `Step.export`; returns their number.

        Collective, after the same number of steps; trainer 0 writes. It has all keys in memory, and
        some rows at a time.

        Raises:
            CheckpointError: the folder exists already, or cannot be written.
            ProgramError: the step does not look up this table.
            PeerLostError: a server, or another trainer, is gone or late.
        """
        what = self._pause(f"export '{table}'")
        return export_table(self.client, self.tables, table, folder, what, text=text)

    def _pause(self, what: str) -> str:
        """Flushes all trainers' updates; returns a name of the operation, unique at this step."""
        self._pace.flush()
        what = self.client.unique(what)  # there may be several at one step
        if not self._pace.is_sync:
            meet(self.client, what)
        return what

    def stats(self) -> dict[str, Any]:
        """Returns counters of this process, of every server, and of tables over all servers.

        By `trainer`, `servers` (a list) and `tables` (by name).
        """
        client = self.client
        asked = [client.request(n, Kind.STATS) for n in range(len(client.me.endpoints))]
        client.wait(asked)
        mine = {
            "step": client.step,
            "sent_bytes": client.sent_bytes,
            "received_bytes": client.received_bytes,
            **asdict(self._batches.copies),
            **self._pace.stats(),
        }
        servers = [dict(x.answer.body) if x.answer is not None else {} for x in asked]
        return {"trainer": mine, "servers": servers, "tables": table_stats(servers)}

    @property
    def _is_first(self) -> bool:
        return self.client.me.trainer == 0

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

    def resume(self, state: State) -> tuple[State, int]:
        """Returns the state to go on from, and the number of steps that it includes.

        A process that takes a lost trainer's place (`on_trainer_lost="wait"`) receives the state
        before the step that was being computed. In a job that begins, all trainers receive that of
        its last periodic checkpoint (`jaxfleet launch --save-every`), if there is one. Any other
        process has its own state back, which is of no step, or of a checkpoint that it has
        restored.

        Args:
            state: the initial one, as for the first step.

        Raises:
            FeedError: it does not match the example.
            PeerLostError: a server is gone or late, or has lost part of the state.
            CheckpointError: the last periodic checkpoint is of another step.
        """
        leaves, tree = jax.tree_util.tree_flatten(state)
        client = self.client
        if self._newest.is_made_of(leaves):
            return state, client.step
        former = client.former
        if self._newest.leaves:
            return state, 0
        self._newest.check(leaves, tree)
        if former is not None and former.done > 0:
            if self._saver is not None:
                self._saver.resume(former.done)
            return self._resumed(former), former.done
        saver = self._saver
        if saver is None or (found := saver.newest()) is None:
            return state, 0
        path, done = found
        restored = self.restore(path)
        saver.resume(done)
        return restored, done

    def _resumed(self, former: FormerProcess) -> State:
        client, served = self.client, self._served
        client.resume(former.done)
        client.doing(f"returning to step {former.seen}")
        values = {**served.pull(client, served.params), **self._keeper.recall(client)}
        leaves = self._newest.leaves = served.leaves(values)
        self._compares = self._compares and former.done == former.base
        tree = self.captured.signature.state_tree
        state: State = jax.tree_util.tree_unflatten(tree, leaves)
        return state

    def save(
        self, path: str | Path, state: State, *, data: Mapping[str, int] | None = None
    ) -> None:
        """Writes a checkpoint, which a step in any mode restores; collective.

        Every server writes its part, trainer 0 the rest and finally the manifest.

        Args:
            path: a folder that all processes of the job can access. An existing checkpoint is
                replaced once the new one is complete.
            state: the result of the last step; values of any other are sent to the servers first.
            data: the position of a data loader to save with it; trainer 0's is.

        Raises:
            CheckpointError: it cannot be written; the previous checkpoint stays.
            FeedError: it does not match the example, or has handles of an earlier step.
        """
        leaves, tree = jax.tree_util.tree_flatten(state)
        if not self._newest.is_made_of(leaves):
            leaves = self._newest.leaves = self._given(leaves, tree)
        self._pace.flush()
        save_job(self.client, self._served, Path(path).absolute(), leaves, data)

    def restore(self, path: str | Path) -> State:
        """Returns the state of a checkpoint, written in any mode; collective.

        Args:
            path: a folder that all processes of the job can access.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged or of another step.
        """
        client = self.client
        self._refuse_if_returned("restores a checkpoint")
        self._pace.flush()
        if not self._pace.is_sync:  # no push of any trainer may arrive after the restored state
            meet(client, f"restore {path}")
        leaves = self._newest.leaves = restore_job(client, self._served, path)
        self._keeper.keep(client, leaves)
        if self._saver is not None:
            self._saver.resume(client.step)
        self._pace.restart(self._served.held(leaves))
        tree = self.captured.signature.state_tree
        restored: State = jax.tree_util.tree_unflatten(tree, leaves)
        return restored

    def close(self) -> None:
        """Disconnects this trainer from the servers, which end when all trainers have."""
        self._close_logs()
        self._finite.look(self._newest.leaves)
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.close()
        else:
            self._close_logs()
            self._lines.abandon()

    def _given(self, leaves: list[Any], tree: Any) -> list[Any]:
        """Returns a state whose values the servers have, after sending them missing ones."""
        newest = self._newest
        if newest.is_made_of(leaves):
            return leaves
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
        return found

    def _refuse_if_returned(self, what: str) -> None:
        """Rejects what only trainers of a new job may do, in one that returns to its job."""
        former = self.client.former
        if former is not None and former.done > 0 and not self._newest.leaves:
            raise FeedError(
                f"trainer {self.client.me.trainer} returns to a job at step {former.seen}, and "
                f"{what}",
                hint="begin with `state, done = step.resume(state)`, and go on with batches[done:]",
            )

    def _refuse_another_state(self) -> None:
        """Rejects a new state if servers continue from checkpoints of an earlier run."""
        self._refuse_if_returned("begins with a state of its own")
        if self.client.former is not None:
            return  # the job is before its second step, and has begun with this state
        trainer, found = self.client.me.trainer, self._lines.found
        if found > 0 or (found == 0 and trainer == 0):
            what = (
                f"trainer {trainer} begins with a state of its own, and the servers go on from "
                f"their checkpoints of step {found}"
            )
            hint = "launch with another --job or --checkpoint-dir; or begin with step.restore(path)"
            if self.client.me.life > 0:
                hint = (
                    "it was restarted, and a trainer comes back only to a job with "
                    "strategy.on_trainer_lost='wait'; --max-restarts starts the whole job again"
                )
            raise FeedError(what, hint=hint)
