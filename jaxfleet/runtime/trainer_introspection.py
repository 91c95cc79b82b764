"""Views of a trainer's step without running it: programs, memory, explanations, reports."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jaxfleet.capture import Captured
from jaxfleet.errors import JaxfleetError, StrategyError
from jaxfleet.ir import Program
from jaxfleet.lower import ExecutableCache
from jaxfleet.lower.partition import rows_of
from jaxfleet.observability import Progress, StepSpans
from jaxfleet.pipeline import Record
from jaxfleet.ps.client.client import Client
from jaxfleet.report import History, Measured, TimePart
from jaxfleet.runtime.memory_report import (
    MemoryReport,
    TrainerMemory,
    memory_of,
    own_rows,
    report_of,
)
from jaxfleet.runtime.pserver_job import JobPrograms, explain_job
from jaxfleet.runtime.step_html import Explanation, step_html
from jaxfleet.runtime.step_timing import Calls, measured
from jaxfleet.runtime.step_view import add_to_dump, step_history, write_view
from jaxfleet.runtime.trainer_batches import TrainerBatches
from jaxfleet.runtime.trainer_connection import TrainerSync
from jaxfleet.runtime.trainer_timing import blocks_of, times_of_training
from jaxfleet.runtime.transpile import calls_to_measure, end_if_only_dumping
from jaxfleet.strategy import DistributedStrategy

_NOT_RUN = "No step has run since the first, so that its waits and messages are not known."


class TrainerViews:
    """Read-only views of a `TrainerStep`.

    Attributes:
        strategy: how it is distributed.
        captured: the one-device program.
    """

    strategy: DistributedStrategy
    captured: Captured
    _job: JobPrograms
    _cache: ExecutableCache
    _has_run: bool
    _batches: TrainerBatches
    _pace: TrainerSync
    _spans: StepSpans | None = None  # of the client
    _calls = 0

    def stats(self) -> dict[str, Any]:
        """Returns counters of this process and of every server."""
        raise NotImplementedError

    @property
    def program(self) -> Program:
        return self._job.trainer

    @property
    def server_programs(self) -> tuple[Program, ...]:
        return self._job.servers

    @property
    def startup_program(self) -> Program:
        """This trainer's startup program, which runs when the job begins."""
        return self._job.trainer_startup

    @property
    def server_startup_programs(self) -> tuple[Program, ...]:
        """The servers' startup programs, which receive each one's state."""
        return self._job.server_startups

    @property
    def dumps(self) -> Record:
        """Record of every pass on the trainer's program."""
        return self._job.dumps

    def explain(self) -> Explanation:
        """Returns about twenty lines on the decisions made, and why."""
        return explain_job(self.captured, self.strategy, self._job)

    def view(self, path: str | Path, *, measure: int = 0) -> Path:
        """Writes a report of this trainer's and all servers' programs, as `Step.view`.

        Args:
            path: a file, replaced if it exists.
            measure: how many calls of its compiled blocks to time, which compute with zeros, apart
                from the job; the default is none. The report then has, of at most as many of the
                newest training steps, the times of messages and of waiting for servers too.
        """
        timing = self._measured(measure) if measure else None
        return write_view(path, [self._with_facts_of_runs(timing)], self._job.servers)

    def _with_facts_of_runs(self, timing: Measured | None) -> History:
        history, fit = replace(self._history(), measured=timing), self._job.fit
        if self._has_run or timing is not None:
            with contextlib.suppress(StrategyError):  # a step whose memory is not planned
                history = replace(history, xla_bytes=self._memory().peak().bytes)
                history = replace(history, xla_bytes_before=None if fit is None else fit.before)
        return history

    def _history(self) -> History:
        job = self._job
        return step_history(self.captured, self.strategy, job.dumps, self.explain(), fit=job.fit)

    def _measured(self, calls: int) -> Measured:
        found = measured(jax.devices()[:1], self._blocks, calls)
        parts, steps = self._times_of_training(calls)
        note = found.note if steps else " ".join(filter(None, (found.note, _NOT_RUN)))
        return replace(found, parts=parts, steps=steps, note=note)

    def _time_steps(self, client: Client) -> None:
        client.spans = self._spans = StepSpans(client.spans)

    def _blocks(self) -> Calls:
        newest = self._batches.newest
        if newest is not None:
            return blocks_of(newest.trainer.program, newest.trainer.sizes, self._cache)
        program = self._pace.program_of_steps(self._job.trainer)
        rows = own_rows(self._job, self.strategy, self.captured.signature.rows)
        return blocks_of(program, rows_of(program, rows), self._cache)

    def _times_of_training(self, count: int) -> tuple[list[TimePart], int]:
        spans, servers = self._spans, list[Mapping[str, Any]]()
        if spans is None or not spans.newest(1):
            return [], 0
        with contextlib.suppress(JaxfleetError):  # servers that are gone count nothing more
            servers = self.stats()["servers"]
        return times_of_training(spans, count, servers)

    def _before_call(self) -> None:
        """Adds times to the dump if the environment asks, or ends the process if for dumps only."""
        folder, number = self._job.dumps.folder, self._calls
        self._calls += 1
        if folder is not None and (calls := calls_to_measure()) and number in {0, calls + 1}:
            add_to_dump(folder, self._with_facts_of_runs(self._measured(calls)))
        end_if_only_dumping()

    def memory_report(self) -> MemoryReport:
        """Returns this trainer's memory use, before and after it was fitted to a budget.

        Raises:
            StrategyError: the step looks up tables, or trainers update by themselves.
        """
        with Progress(f"memory_report of '{self.program.name}'") as progress:
            progress.show("compiling it")
            return report_of(self._memory(), self._job.fit)

    def _memory(self) -> TrainerMemory:
        return memory_of(self._job, self.strategy, self.captured.signature.rows, self._cache)

    def __repr__(self) -> str:
        servers = len(self._job.servers)
        return f"TrainerStep('{self.captured.program.name}', servers={servers})"

    def _repr_html_(self) -> str:
        job = self._job
        rows = [
            ("mode", f"pserver, communication {self.strategy.communication}"),
            ("processes", f"{len(job.servers)} servers, {job.trainers} trainers"),
            ("example", f"batch of {self.captured.signature.rows} rows"),
        ]
        if job.fit is not None:
            rows.append(("memory budget", job.fit.note))
        programs = [("trainer", job.trainer)]
        programs += [(f"server {number}", each) for number, each in enumerate(job.servers)]
        return step_html(
            "TrainerStep", self.captured, rows, programs=programs, folder=job.dumps.folder
        )
