"""View of `jaxfleet top`: rates between two samples of every server, or rank, of a job."""

import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from jaxfleet.errors import ConnectError, StrategyError
from jaxfleet.observability.plain_text import printable
from jaxfleet.observability.scrape import Sample, scrape

_MB = 1e6
_NOTABLE = 0.1  # least share of the time that the others wait for the slowest
_CLEARLY = 1.1  # times the time that any other takes for a step of its own
_APART = 2  # more steps behind than messages in flight explain
_MOST_AT_A_TIME = 16
SILENT_S = 3.0  # trainers send a heartbeat every second
TIMED_OUT = "does not answer in time"


@dataclass(frozen=True)
class Looked:
    """Two samples of one server or rank, or the error of the last attempt."""

    before: Sample | None = None
    now: Sample | None = None
    error: str = ""

    def then(self, found: Sample | str) -> "Looked":
        if isinstance(found, str):
            return Looked(None, None, found)
        return Looked(self.now or found, found)

    @property
    def step_s(self) -> float | None:
        """Seconds that a rank's steps took on average; None of a server, or without a step."""
        if self.now is None or self.now.rank is None or not self.rate("rank_step"):
            return None
        return 1 / self.rate("rank_step")

    def rate(self, name: str) -> float:
        """Returns the rate of a counter per second, 0 after one sample."""
        if self.now is None or self.before is None or self.now.at_s <= self.before.at_s:
            return 0.0
        grew = self.now.values.get(name, 0.0) - self.before.values.get(name, 0.0)
        # A restarted server counts from 0.
        return max(0.0, grew) / (self.now.at_s - self.before.at_s)


@dataclass(frozen=True)
class Seen:
    """State of a trainer, combined from all servers that answered; or of a rank.

    Attributes:
        number: of the trainer.
        step: the last step for which it sent anything.
        behind: how many steps it is behind the first trainer.
        silent_s: seconds since its last message.
        late: its delay after the first trainer, in seconds per second; the most that any server
            measured. Above 1 where trainers do not wait and it is steps behind. Of a rank, how much
            longer it takes to join in a step than the fastest.
        own: share of its time that it spends on its steps, without waiting for servers; the least
            that any server measured. None if none did.
        doing: its last reported activity.
        has_left: whether it has left.
        starts: how many processes with its number have come, the most that any server counted.
    """

    number: int
    step: int
    behind: int
    silent_s: float
    late: float
    own: float | None
    doing: str
    has_left: bool
    starts: int = 1


@dataclass
class Board:
    """Samples servers, or the ranks of a collective job, repeatedly.

    Attributes:
        addresses: of their metrics: `HOST:PORT`.
        look_at: samples one of them.
        found: results by address.
    """

    addresses: Sequence[str]
    look_at: Callable[[str], Sample] = scrape
    found: dict[str, Looked] = field(default_factory=dict)
    _is_of_ranks: bool = False  # of the last that answered

    def look(self) -> None:
        """Samples all servers at the same time: one that does not answer delays no other."""
        with ThreadPoolExecutor(max_workers=_MOST_AT_A_TIME) as threads:
            samples = list(threads.map(self._sample, self.addresses))
        for address, sample in zip(self.addresses, samples, strict=True):
            self.found[address] = self.found.get(address, Looked()).then(sample)

    def _sample(self, address: str) -> Sample | str:
        try:
            return self.look_at(address)
        except ConnectError as error:
            return str(error)
        except OSError as error:
            return _reason(error)

    @property
    def answers(self) -> list[Looked]:
        return [one for one in self.found.values() if one.now is not None]

    @property
    def kind(self) -> str:
        """What the job's trainers are called: `rank` in a collective job, else `trainer`."""
        known = [one.now for one in self.answers if one.now is not None]
        if known:
            self._is_of_ranks = all(one.rank is not None for one in known)
        return "rank" if self._is_of_ranks else "trainer"

    def trainers(self) -> list[Seen]:
        numbers = sorted({n for one in self.answers if one.now for n in one.now.of_trainers})
        steps = {n: int(max(self._of(n, "trainer_step"), default=0.0)) for n in numbers}
        first = max(steps.values(), default=0)
        return [self._seen(number, steps[number], first) for number in numbers]

    def _seen(self, number: int, step: int, first: int) -> Seen:
        return Seen(
            number,
            step,
            # Ranks take steps together: their samples differ by when they were taken.
            first - step if self.kind == "trainer" else 0,
            min(self._of(number, "trainer_silent_seconds"), default=0.0),
            self._late(number),
            min(self._shares(number, "own"), default=None),
            next((one.now.doing[number] for one in self.answers
                  if one.now is not None and number in one.now.doing), ""),
            max(self._of(number, "trainer_left"), default=0.0) > 0,
            int(max(self._of(number, "trainer_joins_total"), default=1.0)),
        )  # fmt: skip

    def _late(self, number: int) -> float:
        if self.kind != "rank":
            return max(self._share(one, number, "late") or 0.0 for one in self.answers)
        shares = {one.now.rank: self._share(one, one.now.rank, "own") for one in self.answers
                  if one.now is not None and one.now.rank is not None}  # fmt: skip
        known = {rank: share for rank, share in shares.items() if share is not None}
        return known[number] - min(known.values()) if number in known else 0.0

    def _of(self, number: int, name: str) -> list[float]:
        known = [one.now.of_trainers.get(number, {}) for one in self.answers if one.now is not None]
        return [values[name] for values in known if name in values]

    def _shares(self, number: int, kind: str) -> list[float]:
        found = (self._share(one, number, kind) for one in self.answers)
        return [share for share in found if share is not None]

    def _share(self, one: Looked, number: int, kind: str) -> float | None:
        """Returns how fast a counter of a trainer's seconds grows; None if it is not known."""
        name = f"trainer_{kind}_seconds_total"
        if one.now is None or one.before is None or one.now.at_s <= one.before.at_s:
            return None
        samples = (x.of_trainers.get(number, {}).get(name) for x in (one.now, one.before))
        after, before = samples
        if after is None or before is None:
            return None
        return max(0.0, after - before) / (one.now.at_s - one.before.at_s)

    def tables(self) -> Any:
        rich = _rich()
        if self.kind == "rank":
            shown = [self._ranks_table(rich)]
        else:
            shown = [self._servers_table(rich), self._trainers_table(rich)]
        said = _keeping_pace(self.trainers(), self.kind), self._restarted()
        return rich.Group(*shown, *(line for line in said if line))

    def _restarted(self) -> str:
        count = max(
            (x.now.values.get("job_restarts", 0.0) for x in self.answers if x.now), default=0
        )
        again = "once" if count == 1 else f"{count:.0f} times"
        return f"the whole job was started again {again}" if count else ""

    def _servers_table(self, rich: Any) -> Any:
        heads = ("server", "step", "steps/s", "in MB/s", "out MB/s", "busy", "queued MB", "rows",
                 "saves")  # fmt: skip
        table = _table(rich, heads)
        for number, address in enumerate(self.addresses):
            one = self.found.get(address, Looked())
            name = rich.Text(f"{number} {address}")
            if one.now is None:
                table.add_row(name, rich.Text(printable(one.error or "not looked at yet")))
                continue
            values = one.now.values
            rows = sum(counted.get("table_rows", 0.0) for counted in one.now.tables.values())
            table.add_row(
                name,
                f"{values['server_step']:.0f}" if values["server_step"] >= 0 else "-",
                f"{one.rate('server_step'):.1f}",
                f"{one.rate('received_bytes_total') / _MB:.2f}",
                f"{one.rate('sent_bytes_total') / _MB:.2f}",
                f"{one.rate('block_seconds_total'):.0%}",
                f"{values.get('queued_bytes', 0.0) / _MB:.2f}",
                f"{rows:,.0f}",
                f"{values.get('saves_total', 0.0):.0f}",
            )
        return table

    def _ranks_table(self, rich: Any) -> Any:
        heads = "rank", "step", "steps/s", "step ms", "others waited", "memory MB", "saves", "doing"
        table = _table(rich, heads)
        seen = {one.number: one for one in self.trainers()}
        slowest = _slowest(seen.values())
        for number, address in enumerate(self.addresses):
            one = self.found.get(address, Looked())
            if one.now is None or one.now.rank is None:
                name = rich.Text(f"{number} {address}")
                table.add_row(name, rich.Text(printable(one.error or "not looked at yet")))
                continue
            rank, values = seen[one.now.rank], one.now.values
            mark = " slowest" if rank.number == slowest else ""
            table.add_row(
                rich.Text(f"{rank.number}{mark} {address}"),
                f"{rank.step}",
                f"{one.rate('rank_step'):.1f}",
                "" if one.step_s is None else f"{1e3 * one.step_s:.1f}",
                f"{min(1.0, rank.late):.0%}",
                f"{values.get('resident_bytes', 0.0) / _MB:.0f}",
                f"{values.get('saves_total', 0.0):.0f}",
                rich.Text(printable(rank.doing)),
            )
        return table

    def _trainers_table(self, rich: Any) -> Any:
        heads = "trainer", "starts", "step", "behind", "others waited", "last heard", "doing"
        table, seen = _table(rich, heads), self.trainers()
        slowest = _slowest(seen)
        for one in seen:
            name = f"{one.number}{' slowest' if one.number == slowest else ''}"
            if _is_silent(one):
                name = f"{one.number} silent"
            heard = "left" if one.has_left else f"{one.silent_s:.1f} s ago"
            words = f"{one.step}", f"{one.behind}", f"{min(1.0, one.late):.0%}", heard
            table.add_row(name, f"{one.starts}", *words, rich.Text(printable(one.doing)))
        return table


def _reason(error: OSError) -> str:
    """Describes why a server gave no metrics, without the words of the library."""
    inner = getattr(error, "reason", error)
    if isinstance(inner, TimeoutError):
        return TIMED_OUT
    if isinstance(inner, ConnectionRefusedError):
        return "is not there: nothing listens at its port"
    if isinstance(inner, ConnectionError):
        return "closed the connection"
    if isinstance(inner, socket.gaierror):
        return f"has no address: {inner.strerror}"
    if isinstance(inner, OSError) and inner.strerror:
        return f"does not answer: {inner.strerror}"
    return str(inner)


def _is_silent(one: Seen) -> bool:
    return one.silent_s >= SILENT_S and not one.has_left


def _slowest(seen: Iterable[Seen]) -> int | None:
    """Returns the trainer that delays the others or is far behind; None if all keep pace.

    When trainers wait for each other, one always comes last, which alone means nothing: only a
    trainer that is late far more than any other, and takes longer for a step of its own, counts:
    trainers that do not wait may be apart by a constant part of a step. Their messages are up to a
    step apart.
    """
    here = sorted((one for one in seen if not one.has_left), key=lambda one: (one.late, one.behind))
    if len(here) < 2:
        return None
    *_, next_to_last, last = here
    if last.late >= max(_NOTABLE, 2 * next_to_last.late) and _takes_longest(last, here):
        return last.number
    furthest = max(here, key=lambda one: one.behind)
    return furthest.number if furthest.behind >= _APART else None


def _takes_longest(one: Seen, here: Sequence[Seen]) -> bool:
    """Whether a trainer clearly takes longer for its own part of a step than any other."""
    others = [other.own for other in here if other is not one]
    known = [own for own in others if own is not None]
    if one.own is None or len(known) < len(others):
        return True  # servers of an older version do not measure it
    return one.own >= _CLEARLY * max(known)


def _keeping_pace(seen: Sequence[Seen], kind: str) -> str:
    here = [one for one in seen if not one.has_left]
    if len(here) < 2 or _slowest(here) is not None or any(map(_is_silent, here)):
        return ""
    late = max(one.late for one in here)
    if late >= _NOTABLE:
        return f"{kind}s keep pace: none is behind, or takes longer for a step than the others"
    return f"{kind}s keep pace: the others wait for none more than {late:.0%}"


def _table(rich: Any, heads: Iterable[str]) -> Any:
    table = rich.Table(box=None, pad_edge=False, header_style="bold")
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if place else "left", no_wrap=True)
    table.columns[-1].justify = "left"
    return table


def _rich() -> Any:
    try:
        from rich import console, table, text  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise StrategyError("top needs rich", hint="pip install 'jaxfleet[watch]'") from error
    return SimpleNamespace(Group=console.Group, Table=table.Table, Text=text.Text)
