"""Metrics of a rank of a collective job, and their export to Prometheus."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from jaxfleet.env import Rank, read_metrics_host, read_metrics_port
from jaxfleet.observability import printable, resident_bytes, write_token
from jaxfleet.observability.metrics_server import Exporter
from jaxfleet.observability.trainer_metrics import (
    TrainerMetrics,
    ending_families,
    trainer_families,
)
from jaxfleet.transport.secret import metrics_token

if TYPE_CHECKING:
    from pathlib import Path

    from jaxfleet.cluster.coordinator_client import CoordinatorClient

_MOST_SCALARS, _LONGEST = 64, 200


class RankCounts:
    """Counts of a rank's work. One thread counts, and any may read.

    A step of all ranks ends on all of them at about the same time, since each needs the results of
    the others. What differs is the time that a rank takes until it joins in the next step: the rank
    that takes longest is the one that the others wait for.

    Attributes:
        run_s: seconds in computations of all ranks, with the waits for others within them.
        own_s: seconds between those, without waits for others.
        saves: checkpoints that this rank wrote.
        scalars: returns the newest scalar metrics and their step, without waiting for a step.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.run_s = self.own_s = 0.0
        self.saves = 0
        self.scalars: Callable[[], tuple[int, Mapping[str, float]]] = lambda: (0, {})
        self._clock = clock
        self._ended: float | None = None  # of the last computation
        self._waited_s = 0.0  # since then

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts a computation of all ranks."""
        begin = self._clock()
        if self._ended is not None:
            self.own_s += max(0.0, begin - self._ended - self._waited_s)
        try:
            yield
        finally:
            self._ended, self._waited_s = self._clock(), 0.0
            self.run_s += self._ended - begin

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts a wait for other ranks outside of computations."""
        begin = self._clock()
        try:
            yield
        finally:
            self._waited_s += self._clock() - begin


class RankExporter(Exporter):
    """Exports what a rank does, with the metrics of a trainer."""

    def __init__(self, member: "CoordinatorClient", counts: RankCounts) -> None:
        super().__init__()
        self._member, self._counts = member, counts
        self._started = time.time()
        self._is_ended = self._is_failed = False
        self._restarts = 0
        self._token_file: Path | None = None

    def serve(self, here: Rank, secret: bytes | None) -> None:
        """Serves the metrics if the environment specifies a port.

        With a secret, a token is required, which `jaxfleet top` of this user finds in a file.

        Raises:
            ConnectError: the port is taken.
            StrategyError: prometheus_client is not installed.
        """
        self._restarts = here.restart
        port = read_metrics_port(here.rank)
        if port is None:
            return
        token = None if secret is None else metrics_token(secret)
        self.start(read_metrics_host(), port, token)
        self._token_file = None if token is None else write_token(port, token)

    def end(self, *, is_failed: bool) -> None:
        """Exports that this rank ends, which whoever watches it may see, and closes."""
        self._is_ended, self._is_failed = True, is_failed
        self.wait_for_scrape()
        self.close()

    def close(self) -> None:
        super().close()
        if self._token_file is not None:
            self._token_file.unlink(missing_ok=True)

    def families(self, core: Any) -> Iterator[Any]:
        counts, doing = self._counts, self._member.doing
        gauge, counter = core.GaugeMetricFamily, core.CounterMetricFamily
        text = "The step that the rank has begun last."
        yield gauge("jaxfleet_rank_step", text, value=doing.step)
        text = "The rank's start, as a Unix time."
        yield gauge("jaxfleet_rank_start_time_seconds", text, value=self._started)
        text = "Seconds in computations of all ranks, with the waits for others within them."
        yield counter("jaxfleet_rank_run_seconds", text, value=counts.run_s)
        text = "Checkpoints that the rank wrote."
        yield counter("jaxfleet_saves", text, value=counts.saves)
        text = "How often the launch started the whole job again."
        yield gauge("jaxfleet_job_restarts", text, value=self._restarts)
        memory = resident_bytes()
        yield gauge("jaxfleet_resident_bytes", "Resident memory of the rank.", value=memory)
        yield from ending_families(core, is_ended=self._is_ended, is_failed=self._is_failed)
        step, scalars = counts.scalars()
        trainer = TrainerMetrics(
            number=self._member.rank,
            step=doing.step,
            silent_s=0.0,
            late_s=None,  # only a comparison of all ranks shows it
            doing=printable(f"step {doing.step}: {doing.what}", _LONGEST),
            has_left=self._is_ended and not self._is_failed,
            own_s=counts.own_s,
            resident_bytes=memory,
            scalar_step=step,
            scalars=dict(islice(scalars.items(), _MOST_SCALARS)),
        )
        yield from trainer_families(core, [trainer])
