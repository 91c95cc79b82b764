"""Times of a process's newest steps by kind of work, kept in memory for its report."""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType

from jaxfleet.observability.timeline import NO_SPANS, Spans

_KEPT = 100  # steps; more would be of another time
_STEP = "step"


@dataclass
class StepTimes:
    """Times of one step.

    Attributes:
        whole_s: of the step.
        by_span: seconds of the spans in it, by name, each without the spans within it.
    """

    whole_s: float = 0.0
    by_span: dict[str, float] = field(default_factory=dict)


class StepSpans(Spans):
    """Adds up the spans within each `step`, beside what another recorder does with them.

    Used by one thread. The first step, which compiles, is left out.

    Args:
        recorder: another recorder of the same spans.
    """

    def __init__(self, recorder: Spans = NO_SPANS) -> None:
        self._recorder = recorder
        self._steps: deque[StepTimes] = deque(maxlen=_KEPT)
        self._current: StepTimes | None = None
        self._open: list[_TimedSpan] = []
        self._has_begun = False  # the first step has ended

    def span(self, name: str, /, **facts: object) -> AbstractContextManager[None]:
        return _TimedSpan(self, name, self._recorder.span(name, **facts))

    def newest(self, count: int) -> Sequence[StepTimes]:
        """Returns the times of the newest complete steps, at most this many."""
        return list(self._steps)[-count:] if count > 0 else []

    def _begin(self, span: "_TimedSpan") -> None:
        if span.name == _STEP:
            self._current = StepTimes()
            self._open.clear()
        self._open.append(span)

    def _end(self, span: "_TimedSpan", took_s: float, *, failed: bool) -> None:
        if not self._open or self._open.pop() is not span:
            return  # the step around it has begun again
        if self._open:
            self._open[-1].inner_s += took_s
        step = self._current
        if step is None:
            return
        if span.name != _STEP:
            known = step.by_span.get(span.name, 0.0)
            step.by_span[span.name] = known + took_s - span.inner_s
            return
        self._current, step.whole_s = None, took_s
        if not failed and self._has_begun:
            self._steps.append(step)
        self._has_begun = True


class _TimedSpan(AbstractContextManager[None]):
    """One span, in the recorder around it too."""

    __slots__ = ("_began", "_recorded", "_spans", "inner_s", "name")

    def __init__(self, spans: StepSpans, name: str, recorded: AbstractContextManager[None]) -> None:
        self._spans, self.name, self._recorded = spans, name, recorded
        self._began = self.inner_s = 0.0

    def __enter__(self) -> None:
        self._recorded.__enter__()
        self._spans._begin(self)  # noqa: SLF001
        self._began = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        took_s = time.perf_counter() - self._began
        self._spans._end(self, took_s, failed=error is not None)  # noqa: SLF001
        self._recorded.__exit__(kind, error, trace)
