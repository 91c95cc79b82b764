"""Views of a trainer's step without running it: programs, memory, explanations, reports."""

import contextlib
from dataclasses import replace
from pathlib import Path

from jaxfleet.capture import Captured
from jaxfleet.errors import StrategyError
from jaxfleet.ir import Program
from jaxfleet.lower import ExecutableCache
from jaxfleet.observability import Progress
from jaxfleet.pipeline import Record
from jaxfleet.report import History
from jaxfleet.runtime.memory_report import MemoryReport, TrainerMemory, memory_of, report_of
from jaxfleet.runtime.pserver_job import JobPrograms, explain_job
from jaxfleet.runtime.step_html import Explanation, step_html
from jaxfleet.runtime.step_view import step_history, write_view
from jaxfleet.strategy import DistributedStrategy

_TIMELINE = "jaxfleet timeline draws what its calls took, from JAXFLEET_TRACE_DIR."


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
            measure: times no calls, since each would train the servers; the report states that.
        """
        history, fit = self._history(), self._job.fit
        asked = f"{measure} calls were to be timed, but a" if measure else "A"
        why = f"{asked} call of a trainer pushes to the servers that train. {_TIMELINE}"
        history = replace(history, why_unmeasured=why)
        if self._has_run:
            with contextlib.suppress(StrategyError):  # a step whose memory is not planned
                history = replace(history, xla_bytes=self._memory().peak().bytes)
                history = replace(history, xla_bytes_before=None if fit is None else fit.before)
        return write_view(path, [history], self._job.servers)

    def _history(self) -> History:
        job = self._job
        return step_history(self.captured, self.strategy, job.dumps, self.explain(), fit=job.fit)

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
