"""Events of a job, found by comparing its servers' metrics with those of the look before."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.observability import Sample

SILENT_S = 3.0  # trainers send a heartbeat every second
_LONGEST = 300  # characters of a text
_MOST_BAD = 1000  # metrics that are not finite


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        at_s: when it was noticed, as a Unix time.
        kind: `died`, `gone`, `ended`, `returned`, `joined`, `left`, `silent`, `lost`, `heard`,
            `saved`, `checkpoint`, `nonfinite` or `finite`.
        text: names the process and the event.
    """

    at_s: float
    kind: str
    text: str


@dataclass(frozen=True)
class _Server:
    """What was last known of a server."""

    number: int
    sample: Sample
    answers: bool = True

    def value(self, name: str) -> float | None:
        return self.sample.values.get(name)

    @property
    def started(self) -> float:
        return self.value("server_start_time_seconds") or 0.0

    @property
    def step(self) -> str:
        return f"step {self.value('server_step') or 0:.0f}"

    @property
    def is_done(self) -> bool:
        """Whether all its trainers had left."""
        trainers = self.sample.of_trainers.values()
        return bool(trainers) and all(one.get("trainer_left", 0) > 0 for one in trainers)


@dataclass(frozen=True)
class _Trainer:
    """State of a trainer, combined from all servers that answer."""

    state: str  # present, silent, lost or left
    joins: Mapping[tuple[int, float], float] = field(default_factory=dict)  # by server and start


class EventDetector:
    """Compares each look at the servers with the one before.

    What is there at the first look is no event. Servers of versions that do not export a metric
    never have its events.
    """

    def __init__(self) -> None:
        self._servers: dict[str, _Server] = {}
        self._trainers: dict[int, _Trainer] = {}
        self._bad: set[tuple[int, str]] = set()
        self._is_first = True

    def look(self, at_s: float, found: Mapping[str, Sample | str]) -> list[Event]:
        """Returns the events since the last look.

        Args:
            at_s: the Unix time.
            found: the metrics of each server by address, always in the same order; or the reason
                that it did not answer.
        """
        samples = [one for one in found.values() if isinstance(one, Sample)]
        events = [
            *self._of_servers(found),
            *self._of_saves(found),
            *self._of_trainers(found),
            *self._of_scalars(samples),
        ]
        for number, (address, sample) in enumerate(found.items()):
            if isinstance(sample, Sample):
                self._servers[address] = _Server(number, sample)
            elif address in self._servers:
                self._servers[address] = replace(self._servers[address], answers=False)
        is_first, self._is_first = self._is_first, self._is_first and not samples
        return [] if is_first else [Event(at_s, kind, text[:_LONGEST]) for kind, text in events]

    def _of_servers(self, found: Mapping[str, Sample | str]) -> Iterator[tuple[str, str]]:
        answered = [known for known in self._servers.values() if known.answers]
        if answered and not any(isinstance(one, Sample) for one in found.values()):
            # Servers end right after the last bye, which is then in no metrics.
            if all(known.is_done for known in answered):
                yield "ended", f"the job has ended, after {answered[0].step}"
            else:
                what = "the job has ended, or its servers died"
                yield "gone", f"no server answers any more, after {answered[0].step}: {what}"
            return
        for number, (address, sample) in enumerate(found.items()):
            known, name = self._servers.get(address), f"server {number}"
            if isinstance(sample, str):
                if known is not None and known.answers and known.is_done:
                    yield "ended", f"{name} ended after {known.step}"
                elif known is not None and known.answers:
                    yield "died", f"{name} {sample}, after {known.step}"
                continue
            now = _Server(number, sample)
            if known is None:
                yield "joined", f"{name} answers, after {now.step}"
            elif known.started != now.started:
                yield "returned", f"{name} was started again, after {now.step}"
            elif not known.answers:
                yield "returned", f"{name} answers again, after {now.step}"

    def _of_saves(self, found: Mapping[str, Sample | str]) -> Iterator[tuple[str, str]]:
        wrote: list[int] = []
        for number, (address, sample) in enumerate(found.items()):
            known = self._servers.get(address)
            if known is None or isinstance(sample, str):
                continue
            now = _Server(number, sample)
            is_same = known.started == now.started
            if (now.value("saves_total") or 0) > (known.value("saves_total") or 0) and is_same:
                wrote.append(number)
            own, before = now.value("checkpoint_step"), known.value("checkpoint_step")
            if is_same and own is not None and own != before:
                yield "checkpoint", f"server {number} kept a checkpoint of step {own:.0f}"
        if wrote:
            several = len(wrote) > 1
            names = f"server{'s' if several else ''} {', '.join(map(str, wrote))}"
            yield "saved", f"{names} wrote {'parts' if several else 'a part'} of a checkpoint"

    def _of_trainers(self, found: Mapping[str, Sample | str]) -> Iterator[tuple[str, str]]:
        samples = [(n, s) for n, s in enumerate(found.values()) if isinstance(s, Sample)]
        for number in sorted({one for _, sample in samples for one in sample.of_trainers}):
            of = [(n, s, s.of_trainers[number]) for n, s in samples if number in s.of_trainers]
            joins = {
                (n, _Server(n, s).started): values.get("trainer_joins_total", 1.0)
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
            else:
                yield state, f"{name} {_SAID[state]}, at {step}"

    def _of_scalars(self, samples: Sequence[Sample]) -> Iterator[tuple[str, str]]:
        newest: dict[int, tuple[float, dict[str, float]]] = {}
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
                    yield "nonfinite", f"trainer {trainer}: {name} is {value} at step {step:.0f}"
                elif math.isfinite(value) and is_bad:
                    self._bad.discard((trainer, name))
                    yield "finite", f"trainer {trainer}: {name} is finite again, at step {step:.0f}"


_SAID = {
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
    if all(one.get("trainer_silent_seconds", 0) >= SILENT_S for one in values):
        return "silent"
    return "present"
