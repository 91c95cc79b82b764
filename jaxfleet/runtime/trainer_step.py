"""TrainerStep: a step of a parameter-server job, with the signature of the user's own."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, Self

import jax
import numpy as np

from jaxfleet.capture import Captured
from jaxfleet.errors import FeedError
from jaxfleet.ir import Program
from jaxfleet.lower import ExecutableCache
from jaxfleet.pipeline import Record
from jaxfleet.ps.client import Client
from jaxfleet.ps.messages import Kind
from jaxfleet.ps.tables import RemoteTables
from jaxfleet.ps.whole_tables import figures
from jaxfleet.runtime.agreement import compare_batches
from jaxfleet.runtime.evaluation import Evaluator
from jaxfleet.runtime.explain_job import explain_job
from jaxfleet.runtime.finite_watch import FiniteWatch
from jaxfleet.runtime.handles import Handle
from jaxfleet.runtime.job_lines import JobLines
from jaxfleet.runtime.job_programs import JobPrograms
from jaxfleet.runtime.job_saving import meet, restore_job, save_job
from jaxfleet.runtime.job_tables import export_table, shrink_table
from jaxfleet.runtime.memory_report import MemoryReport, report_of
from jaxfleet.runtime.newest_state import NewestState
from jaxfleet.runtime.pace import Pace
from jaxfleet.runtime.served_state import ServedState
from jaxfleet.runtime.strategy import DistributedStrategy
from jaxfleet.runtime.trainer_batches import Programs, TrainerBatches
from jaxfleet.runtime.trainer_memory import fitting, memory_of
from jaxfleet.runtime.type_variables import Batch, Metrics, Result, State
from jaxfleet.tables.host import looked_up, specs_of


class TrainerStep(Generic[State, Metrics]):
    """A step that runs on a trainer and updates on servers: `state, metrics = step(state, batch)`.

    Attributes:
        strategy: how it is distributed.
        captured: the one-device program.
        client: the lines to the servers.
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
        self._pace = Pace(self._job.trainer, cache)
        self._batches = TrainerBatches(
            captured, self._job, example, is_local=strategy.batch == "local",
            programs=programs, pace=self._pace,
        )  # fmt: skip
        specs = specs_of(captured.program)
        self._lines = JobLines(lambda: connect(self._job), self._pace, specs)
        self._served = ServedState(captured, self._job)
        self._newest = NewestState(captured)
        self._evaluator = Evaluator(captured)
        self._finite = FiniteWatch(
            strategy.on_nonfinite,
            [captured.program.variables[leaf.name] for leaf in captured.signature.state],
            speaks=lambda: not self._pace.is_sync or self.client.me.trainer == 0,
            of_own=True,
            waits=lambda: self._pace.is_sync,
        )
        self._pauses = 0
        # Only where all wait for each other do all come to their first steps together.
        self._compares = (
            self._pace.is_sync and strategy.batch == "global" and self._job.trainers > 1
        )

    @property
    def program(self) -> Program:
        """This trainer's program."""
        return self._job.trainer

    @property
    def server_programs(self) -> tuple[Program, ...]:
        """The servers' programs."""
        return self._job.servers

    @property
    def startup_program(self) -> Program:
        """This trainer's startup program, which runs when the job begins."""
        return self._job.trainer_startup

    @property
    def server_startup_programs(self) -> tuple[Program, ...]:
        """The servers' startup programs: what each takes in."""
        return self._job.server_startups

    @property
    def dumps(self) -> Record:
        """What every pass did to the trainer's program."""
        return self._job.dumps

    def explain(self) -> str:
        """Returns about twenty lines on what was decided, and why."""
        return explain_job(self.captured, self.strategy, self._job)

    def memory_report(self) -> MemoryReport:
        """Returns what this trainer takes in memory, before and after it was made to fit a budget.

        Raises:
            StrategyError: the step looks up tables, or trainers update by themselves.
        """
        memory = memory_of(self._job, self.strategy, self.captured.signature.rows, self._cache)
        return report_of(memory, self._job.fit, self._job.dumps)

    @property
    def client(self) -> Client:
        """The lines to the servers; opened when they are first needed."""
        return self._lines.client

    @property
    def tables(self) -> RemoteTables:
        """The job's tables, which servers have."""
        return self._lines.tables

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """Runs one step.

        Args:
            state: as `train_step` takes it, or as the last step returned it. What did not come
                from the last step goes to the servers first; all trainers do so at the same step.
            batch: the whole batch, or this trainer's rows where the strategy says `local`.

        Returns:
            What `train_step` returns; state that only servers have comes as handles.

        Raises:
            FeedError: the state or the batch is not like the example.
            PeerLostError: a server, or another trainer, went or takes too long.
        """
        leaves, tree = jax.tree_util.tree_flatten(state)
        data, rows = self._batches.check(batch)
        client = self.client
        variant = self._batches.variant(rows, client, self._lines.trained)
        leaves = self._given(leaves, tree)
        if self._compares:
            self._compares = False
            compare_batches(client, data)
        fresh = self._pace.begin(client, self._batches.whole(rows))
        client.doing(f"step {client.step}")
        with client.spans.span("step", step=client.step, rows=rows):
            new, fetched = variant.run({**self._served.held(leaves), **fresh}, data, rows)
            new.update(self._pace.end(new, rows // variant.sharers))
        self._newest.leaves = self._served.leaves(new)
        metrics = jax.tree_util.tree_unflatten(variant.captured.metrics_tree, fetched)
        if client.is_replay_full:
            self._served.save_own(client)
        finite = variant.trainer.finite
        self._finite.note(fetched, variant.captured.metrics_tree, self._newest.leaves, finite)
        return jax.tree_util.tree_unflatten(tree, self._newest.leaves), metrics

    def pull(self, state: State) -> State:
        """Returns the state with values in the place of handles.

        Args:
            state: what the last step returned.

        Raises:
            FeedError: it is not the last one: servers hold only the newest.
        """
        leaves, tree = jax.tree_util.tree_flatten(state)
        values = self._values(leaves, set(range(len(leaves))))
        full = [values[at] for at in range(len(leaves))]
        pulled: State = jax.tree_util.tree_unflatten(tree, full)
        return pulled

    def evaluate(
        self, function: Callable[[State, Batch], Result], state: State, batch: Batch
    ) -> Result:
        """Returns `function(state, batch)`, computed here with the state as it is now.

        Only what the function reads comes from the servers. Any trainer may call it alone; see
        `Step.evaluate`.

        Raises:
            FeedError: the state is not what the last step returned.
            CaptureError: a table is looked up by keys that are no leaf of the batch.
            PeerLostError: a server went or takes too long.
        """
        leaves = jax.tree_util.tree_leaves(state)
        result: Result = self._evaluator(
            function,
            state,
            batch,
            bring=lambda places: self._values(leaves, places),
            look_up=self.look_up,
        )
        return result

    def _values(self, leaves: Sequence[Any], places: AbstractSet[int]) -> Mapping[int, Any]:
        """Returns values of some leaves of the newest state, by place; servers' where they have."""
        if not self._newest.is_made_of(leaves):
            what = "the state is not what the last step returned, and servers hold only the newest"
            raise FeedError(what, hint="pull the state that step(...) returned last")
        names = {at: leaf.name for at, leaf in enumerate(self.captured.signature.state)
                 if at in places}  # fmt: skip
        wanted = [name for at, name in names.items() if isinstance(leaves[at], Handle)]
        self._pace.flush()
        if not self._pace.is_sync:  # what this trainer received last may be older
            wanted += [name for name in self._served.params if name in set(names.values())]
        values = self._served.pull(self.client, wanted) if wanted else {}
        return {at: values.get(name, leaves[at]) for at, name in names.items()}

    def look_up(self, table: str, keys: Any) -> np.ndarray:
        """Returns rows of a table as the last step left them: to evaluate a model, say.

        Args:
            table: its name.
            keys: integers of any shape.

        Returns:
            float32[*keys.shape, dim]; of keys that were never trained, what they would begin with.

        Raises:
            FeedError: these are no keys.
            ProgramError: the step looks up no such table.
            PeerLostError: a server went or takes too long.
        """
        return looked_up(self.tables, table, np.asarray(keys))

    def shrink(self, table: str) -> int:
        """Takes out the rows of a table that its evictions say; returns how many.

        All trainers call it together, after as many steps. `Unseen` and `ByScore` ask for it now
        and then, and not at every step.

        Args:
            table: its name.

        Raises:
            ProgramError: the step looks up no such table.
            PeerLostError: a server, or another trainer, went or takes too long.
        """
        what = self._pause(f"shrink '{table}'")
        return shrink_table(self.client, self.tables, table, what)

    def export(self, table: str, folder: str | Path, *, text: bool = False) -> int:
        """Writes a table's rows for other programs; returns how many there are.

        All trainers call it together, after as many steps; trainer 0 writes. It has all keys in
        memory, and some rows at a time.

        Args:
            table: its name.
            folder: a new one: for `keys.npy`, int64[n] ascending, and `rows.npy`, float32[n, dim].
            text: in their place `00000.tsv`, ...: a key, a tab and its row's numbers, a line each.

        Raises:
            CheckpointError: the folder is there already, or cannot be written.
            ProgramError: the step looks up no such table.
            PeerLostError: a server, or another trainer, went or takes too long.
        """
        what = self._pause(f"export '{table}'")
        return export_table(self.client, self.tables, table, folder, what, text=text)

    def _pause(self, what: str) -> str:
        """Has servers have all that trainers sent; returns what all do then, and which time."""
        self._pauses += 1  # there may be several at one step
        self._pace.flush()
        if not self._pace.is_sync:
            meet(self.client, f"{what}, {self._pauses}")
        return f"{what}, {self._pauses}"

    def stats(self) -> dict[str, Any]:
        """Returns what was counted here, by every server, and of tables by all of them together.

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
        return {"trainer": mine, "servers": servers, "tables": figures(servers)}

    def place(self, state: State) -> State:
        """Returns the state as it is: the first step gives the servers what is theirs."""
        return state

    def save(self, path: str | Path, state: State) -> None:
        """Writes a checkpoint, which a step in any mode restores; all trainers call it together.

        Every server writes what it holds, trainer 0 the rest, and then that it is complete.

        Args:
            path: a folder that all processes of the job see. A checkpoint that is there is
                replaced once the new one is complete.
            state: what the last step returned; of another, servers take the values first.

        Raises:
            CheckpointError: it cannot be written; what was there before stays.
            FeedError: it is not like the example, or has handles of an earlier step.
        """
        leaves, tree = jax.tree_util.tree_flatten(state)
        if not self._newest.is_made_of(leaves):
            leaves = self._newest.leaves = self._given(leaves, tree)
        self._pace.flush()
        save_job(self.client, self._served, Path(path).absolute(), leaves)

    def restore(self, path: str | Path) -> State:
        """Returns the state of a checkpoint, written in any mode; all trainers call it together.

        Args:
            path: a folder that all processes of the job see.

        Raises:
            CheckpointError: there is none, it is damaged, or of another step.
        """
        client = self.client
        self._pace.flush()
        if not self._pace.is_sync:  # nobody's pushes may come after what is restored
            meet(client, f"restore {path}")
        leaves = self._newest.leaves = restore_job(client, self._served, path)
        self._pace.restart(self._served.held(leaves))
        tree = self.captured.signature.state_tree
        restored: State = jax.tree_util.tree_unflatten(tree, leaves)
        return restored

    def close(self) -> None:
        """Tells the servers that this trainer is done; they end when all are."""
        self._finite.look(self._newest.leaves)
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.close()
        else:
            self._lines.abandon()

    def __repr__(self) -> str:
        servers = len(self._job.servers)
        return f"TrainerStep('{self.captured.program.name}', servers={servers})"

    def _given(self, leaves: list[Any], tree: Any) -> list[Any]:
        """Returns a state whose values the servers have; sends them what they lack."""
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
        return found

    def _refuse_another_state(self) -> None:
        """Refuses to begin where servers go on: from checkpoints of an earlier run, that is."""
        trainer, found = self.client.me.trainer, self._lines.found
        if found > 0 or (found == 0 and trainer == 0):
            what = (
                f"trainer {trainer} begins with a state of its own, and the servers go on from "
                f"their checkpoints of step {found}"
            )
            hint = "launch with another --job or --checkpoint-dir; or begin with step.restore(path)"
            raise FeedError(what, hint=hint)
