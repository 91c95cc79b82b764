"""Times of a process's newest steps by kind of work, kept in memory for its report."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

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


@dataclass(eq=False)
class _OpenSpan:
    """A span that has not ended.

    Attributes:
        inner_s: seconds of the spans within it.
    """

    name: str
    inner_s: float = 0.0


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
        self._open: list[_OpenSpan] = []
        self._has_begun = False  # the first step has ended

    @contextmanager
    def span(self, name: str, /, **facts: object) -> Iterator[None]:
        is_done = False
        with self._recorder.span(name, **facts):
            opened, began = self._begin(name), time.perf_counter()
            try:
                yield
                is_done = True
            finally:
                self._end(opened, time.perf_counter() - began, failed=not is_done)

    def newest(self, count: int) -> Sequence[StepTimes]:
        """Returns the times of the newest complete steps, at most this many."""
        return list(self._steps)[-count:] if count > 0 else []

    def _begin(self, name: str) -> _OpenSpan:
        opened = _OpenSpan(name)
        if name == _STEP:
            self._current = StepTimes()
            self._open.clear()
        self._open.append(opened)
        return opened

    def _end(self, span: _OpenSpan, took_s: float, *, failed: bool) -> None:
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
