"""Events of a job, found by comparing its processes' metrics with those of the look before."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.observability import Sample
from jaxfleet.observability.metrics_server import WATCHED_S
from jaxfleet.observability.top_view import SILENT_S, TIMED_OUT

_SURE_S = WATCHED_S - 0.5  # between two looks: at its end, a process waits for the second
_LONGEST = 300  # characters of a text
_MOST_BAD = 1000  # metrics that are not finite


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        at_s: when it was noticed, as a Unix time.
        kind: `died`, `gone`, `ended`, `failed`, `returned`, `joined`, `left`, `silent`, `lost`,
            `heard`, `saved`, `checkpoint`, `nonfinite` or `finite`.
        text: names the process and the event.
    """

    at_s: float
    kind: str
    text: str


@dataclass(frozen=True)
class _Process:
    """What was last known of a server, or of a rank of a collective job."""

    number: int
    sample: Sample
    answers: bool = True

    def value(self, name: str) -> float | None:
        return self.sample.values.get(name)

    @property
    def name(self) -> str:
        """Its name in texts: `server 0`."""
        rank = self.sample.rank
        return f"server {self.number}" if rank is None else f"rank {rank}"

    @property
    def started(self) -> float:
        return self.sample.own("start_time_seconds") or 0.0

    @property
    def step(self) -> str:
        return f"step {self.sample.own('step') or 0:.0f}"

    @property
    def is_done(self) -> bool:
        """Whether it had ended its work, or all its trainers had left."""
        trainers = self.sample.of_trainers.values()
        have_left = bool(trainers) and all(one.get("trainer_left", 0) > 0 for one in trainers)
        return have_left or self.has_ended

    @property
    def has_ended(self) -> bool:
        return (self.value("ended") or 0) > 0

    @property
    def lives(self) -> bool:
        return self.answers and not self.has_ended

    @property
    def is_failed(self) -> bool:
        return (self.value("failed") or 0) > 0


@dataclass(frozen=True)
class _Trainer:
    """State of a trainer, combined from all servers that answer."""

    state: str  # present, died, silent, lost or left
    joins: Mapping[tuple[int, float], float] = field(default_factory=dict)  # by server and start


class EventDetector:
    """Compares each look at the servers with the one before.

    What is there at the first look is no event. Servers of versions that do not export a metric
    never have its events.
    """

    def __init__(self) -> None:
        self._processes: dict[str, _Process] = {}
        self._trainers: dict[int, _Trainer] = {}
        self._bad: set[tuple[int, str]] = set()
        self._is_first, self._at_s = True, -math.inf

    def look(self, at_s: float, found: Mapping[str, Sample | str]) -> list[Event]:
        """Returns the events since the last look.

        Args:
            at_s: the Unix time.
            found: the metrics of each server by address, always in the same order; or the reason
                that it did not answer.
        """
        samples = [one for one in found.values() if isinstance(one, Sample)]
        is_sure, self._at_s = at_s - self._at_s <= _SURE_S, at_s
        events = [
            *self._of_saves(found),
            *self._of_trainers(found),
            *self._of_scalars(samples),
            *self._of_processes(found, is_sure=is_sure),  # the end of the job is its last event
        ]
        self._processes |= dict(self._looked(found))
        is_first, self._is_first = self._is_first, self._is_first and not samples
        return [] if is_first else [Event(at_s, kind, text[:_LONGEST]) for kind, text in events]

    def _of_processes(
        self, found: Mapping[str, Sample | str], *, is_sure: bool
    ) -> Iterator[tuple[str, str]]:
        for number, (address, sample) in enumerate(found.items()):
            known = self._processes.get(address)
            if isinstance(sample, str):
                if known is not None and known.lives:
                    yield _end_of(known, sample, is_sure=is_sure)
                continue
            now = _Process(number, sample)
            if now.has_ended:
                if known is None or known.lives:
                    yield _end_of(now, "", is_sure=True)
            elif known is None:
                yield "joined", f"{now.name} answers, after {now.step}"
            elif known.started != now.started:
                yield "returned", f"{now.name} was started again, after {now.step}"
            elif not known.answers:
                yield "returned", f"{now.name} answers again, after {now.step}"
        if not any(known.lives for known in self._processes.values()):
            return
        after = self._processes | dict(self._looked(found))
        if not any(one.lives for one in after.values()):
            yield _end_of_job([*after.values()], is_sure=is_sure)

    def _looked(self, found: Mapping[str, Sample | str]) -> Iterator[tuple[str, _Process]]:
        """Yields what is known of each process after a look."""
        for number, (address, sample) in enumerate(found.items()):
            if isinstance(sample, Sample):
                yield address, _Process(number, sample)
            elif address in self._processes:
                yield address, replace(self._processes[address], answers=False)

    def _of_saves(self, found: Mapping[str, Sample | str]) -> Iterator[tuple[str, str]]:
        wrote: list[_Process] = []
        for number, (address, sample) in enumerate(found.items()):
            known = self._processes.get(address)
            if known is None or isinstance(sample, str):
                continue
            now = _Process(number, sample)
            is_same = known.started == now.started
            if (now.value("saves_total") or 0) > (known.value("saves_total") or 0) and is_same:
                wrote.append(now)
            own, before = now.value("checkpoint_step"), known.value("checkpoint_step")
            if is_same and own is not None and own != before:
                yield "checkpoint", f"{now.name} kept a checkpoint of step {own:.0f}"
        for one in wrote:
            if one.sample.rank is not None:  # which writes the whole
                yield "saved", f"{one.name} wrote a checkpoint, at {one.step}"
        if servers := [one for one in wrote if one.sample.rank is None]:
            numbers, step = ", ".join(str(one.number) for one in servers), servers[0].step
            several, parts = ("s", "parts") if len(servers) > 1 else ("", "a part")
            yield "saved", f"server{several} {numbers} wrote {parts} of a checkpoint, after {step}"

    def _of_trainers(self, found: Mapping[str, Sample | str]) -> Iterator[tuple[str, str]]:
        looked = [(n, s) for n, s in enumerate(found.values()) if isinstance(s, Sample)]
        samples = [(n, s) for n, s in looked if s.rank is None]  # ranks speak for themselves
        for number in sorted({one for _, sample in samples for one in sample.of_trainers}):
            of = [(n, s, s.of_trainers[number]) for n, s in samples if number in s.of_trainers]
            joins = {
                (n, _Process(n, s).started): values.get("trainer_joins_total", 1.0)
                for n, s, values in of
            }
            state = _state_of([values for *_, values in of])
            known, name = self._trainers.get(number), f"trainer {number}"
            step = f"step {max(values.get('trainer_step', 0.0) for *_, values in of):.0f}"
            self._trainers[number] = _Trainer(state, joins)
            if known is None:
                yield "joined", f"{name} joined"
            elif any(known.joins.get(key, value) < value for key, value in joins.items()):
                yield "returned", f"{name} was started again"
            elif state == known.state:
                pass
            elif state == "present":
                yield ("returned" if known.state == "left" else "heard"), f"{name} is heard again"
            elif (known.state, state) == ("died", "silent"):
                pass  # it is said already
            else:
                yield state, f"{name} {_SAID[state]}, at {step}"

    def _of_scalars(self, samples: Sequence[Sample]) -> Iterator[tuple[str, str]]:
        newest: dict[int, tuple[float, dict[str, float]]] = {}
        kind = "trainer" if all(sample.rank is None for sample in samples) else "rank"
        for sample in samples:
            for trainer, scalars in sample.scalars.items():
                step = sample.of_trainers.get(trainer, {}).get("trainer_scalar_step", 0.0)
                if trainer not in newest or newest[trainer][0] < step:
                    newest[trainer] = step, scalars
        for trainer, (step, scalars) in sorted(newest.items()):
            for name, value in scalars.items():
                is_bad = (trainer, name) in self._bad
                if not math.isfinite(value) and not is_bad and len(self._bad) < _MOST_BAD:
                    self._bad.add((trainer, name))
                    yield "nonfinite", f"{kind} {trainer}: {name} is {value} at step {step:.0f}"
                elif math.isfinite(value) and is_bad:
                    self._bad.discard((trainer, name))
                    yield "finite", f"{kind} {trainer}: {name} is finite again, at step {step:.0f}"


def _end_of(known: _Process, why: str, *, is_sure: bool) -> tuple[str, str]:
    """Returns the event of a process that answers no more, and the reason that it did not."""
    if known.is_failed:
        return "failed", f"{known.name} ended with an error, after {known.step}"
    if known.is_done:
        return "ended", f"{known.name} ended after {known.step}"
    if why == TIMED_OUT:
        return "silent", f"{known.name} {why}, after {known.step}"
    if is_sure:
        return "died", f"{known.name} {why}, after {known.step}"
    return "gone", f"{known.name} {why}, after {known.step}: it ended, or died"


def _end_of_job(known: Sequence[_Process], *, is_sure: bool) -> tuple[str, str]:
    """Returns the event of the last process that answers no more."""
    step = max(known, key=lambda one: one.sample.own("step") or 0).step
    kind = "rank" if known[0].sample.rank is not None else "server"
    if all(one.is_done and not one.is_failed for one in known):
        return "ended", f"the job has ended, after {step}"
    if any(one.is_failed for one in known):
        return "failed", f"the job has failed: no {kind} is left, after {step}"
    if is_sure:
        return "died", f"no {kind} is left, after {step}, and the job had not ended"
    what = "the job has ended, or died: a board that looks every second tells which"
    return "gone", f"no {kind} answers any more, after {step}: {what}"


_SAID = {
    "died": "is gone without a bye: its connections have ended",
    "left": "left the job",
    "lost": "is lost: its servers heard nothing for as long as they wait",
    "silent": f"is silent for {SILENT_S:g} s",
}


def _state_of(values: Sequence[Mapping[str, float]]) -> str:
    """Returns the state of a trainer, from each server's metrics of it."""
    if any(one.get("trainer_left", 0) > 0 for one in values):
        return "left"
    if any(one.get("trainer_lost", 0) > 0 for one in values):
        return "lost"
    if any(one.get("trainer_connected", 1) == 0 for one in values):
        return "died"
    if all(one.get("trainer_silent_seconds", 0) >= SILENT_S for one in values):
        return "silent"
    return "present"
