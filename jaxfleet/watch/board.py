"""What `jaxfleet top` shows: rates between two looks at every server of a job."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxfleet.errors import StrategyError
from jaxfleet.watch.scrape import Sample, scrape

_MB = 1e6


@dataclass(frozen=True)
class Looked:
    """Two looks at one server, or why the last one failed.

    Attributes:
        before: the earlier.
        now: the later.
        error: why there is none.
    """

    before: Sample | None = None
    now: Sample | None = None
    error: str = ""

    def then(self, found: Sample | str) -> "Looked":
        """Returns what is known after another look."""
        if isinstance(found, str):
            return Looked(None, None, found)
        return Looked(self.now or found, found)

    def rate(self, name: str) -> float:
        """Returns by how much a counter grew in a second, 0 after one look."""
        if self.now is None or self.before is None or self.now.at_s <= self.before.at_s:
            return 0.0
        grew = self.now.values.get(name, 0.0) - self.before.values.get(name, 0.0)
        return max(0.0, grew) / (self.now.at_s - self.before.at_s)  # a new server counts anew


@dataclass(frozen=True)
class Seen:
    """What is known of a trainer, from all servers that answered.

    Attributes:
        number: which.
        step: the last step it sent anything for.
        behind: how many steps after the first trainer that is.
        silent_s: since when nothing was heard of it.
        late: seconds after the first of all that it came to its steps, of every second; the most
            that any server saw.
        doing: what it last said.
        has_left: whether it said bye.
    """

    number: int
    step: int
    behind: int
    silent_s: float
    late: float
    doing: str
    has_left: bool


@dataclass
class Board:
    """Looks at servers again and again.

    Attributes:
        addresses: where their metrics are: `HOST:PORT`.
        look_at: gets the metrics of one.
        found: what was found, by address.
    """

    addresses: Sequence[str]
    look_at: Callable[[str], Sample] = scrape
    found: dict[str, Looked] = field(default_factory=dict)

    def look(self) -> None:
        """Looks at every server once.

        Raises:
            StrategyError: what reads metrics is not installed.
        """
        for address in self.addresses:
            sample: Sample | str
            try:
                sample = self.look_at(address)
            except OSError as error:
                sample = str(error)
            self.found[address] = self.found.get(address, Looked()).then(sample)

    @property
    def answers(self) -> list[Looked]:
        """Those that answered."""
        return [one for one in self.found.values() if one.now is not None]

    def trainers(self) -> list[Seen]:
        """Returns what servers know of trainers."""
        numbers = sorted({n for one in self.answers if one.now for n in one.now.of_trainers})
        steps = {n: int(max(self._of(n, "trainer_step"))) for n in numbers}
        first = max(steps.values(), default=0)
        return [self._seen(number, steps[number], first) for number in numbers]

    def _seen(self, number: int, step: int, first: int) -> Seen:
        return Seen(
            number,
            step,
            first - step,
            min(self._of(number, "trainer_silent_seconds")),
            max(self._late(one, number) for one in self.answers),
            next((one.now.doing[number] for one in self.answers
                  if one.now is not None and number in one.now.doing), ""),
            max(self._of(number, "trainer_left")) > 0,
        )  # fmt: skip

    def _of(self, number: int, name: str) -> list[float]:
        """Returns what each server says of a trainer."""
        known = [one.now.of_trainers.get(number, {}) for one in self.answers if one.now is not None]
        return [values[name] for values in known if name in values]

    def _late(self, one: Looked, number: int) -> float:
        name = "trainer_late_seconds_total"
        if one.now is None or one.before is None or one.now.at_s <= one.before.at_s:
            return 0.0
        after, before = (
            x.of_trainers.get(number, {}).get(name, 0.0) for x in (one.now, one.before)
        )
        return max(0.0, after - before) / (one.now.at_s - one.before.at_s)

    def tables(self) -> Any:
        """Returns the board as a thing that rich prints.

        Raises:
            StrategyError: rich is not installed.
        """
        rich = _rich()
        return rich.Group(self._servers_table(rich), self._trainers_table(rich))

    def _servers_table(self, rich: Any) -> Any:
        heads = "server", "step", "steps/s", "in MB/s", "out MB/s", "busy", "queued MB", "rows"
        table = _table(rich, heads)
        for number, address in enumerate(self.addresses):
            one = self.found.get(address, Looked())
            name = f"{number} {address}"
            if one.now is None:
                table.add_row(name, one.error or "not looked at yet")
                continue
            values = one.now.values
            rows = sum(counted.get("table_rows", 0.0) for counted in one.now.tables.values())
            table.add_row(
                name,
                f"{values['server_step']:.0f}",
                f"{one.rate('server_step'):.1f}",
                f"{one.rate('received_bytes_total') / _MB:.2f}",
                f"{one.rate('sent_bytes_total') / _MB:.2f}",
                f"{one.rate('block_seconds_total'):.0%}",
                f"{values.get('queued_bytes', 0.0) / _MB:.2f}",
                f"{rows:,.0f}",
            )
        return table

    def _trainers_table(self, rich: Any) -> Any:
        heads = "trainer", "step", "behind", "others waited", "last heard", "doing"
        table, seen = _table(rich, heads), self.trainers()
        slowest = _slowest(seen)
        for one in seen:
            name = f"{one.number}{' slowest' if one.number == slowest else ''}"
            heard = "said bye" if one.has_left else f"{one.silent_s:.1f} s ago"
            words = f"{one.step}", f"{one.behind}", f"{one.late:.0%}", heard, one.doing
            table.add_row(name, *words)
        return table


def _slowest(seen: Iterable[Seen]) -> int | None:
    """Returns who comes last most, or is furthest behind; None where all go alike."""
    here = [one for one in seen if not one.has_left]
    last = max(here, key=lambda one: (one.late, one.behind), default=None)
    if last is None or len(here) < 2 or (last.late < 0.01 and not last.behind):
        return None
    return last.number


def _table(rich: Any, heads: Iterable[str]) -> Any:
    table = rich.Table(box=None, pad_edge=False, header_style="bold")
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if place else "left", no_wrap=True)
    table.columns[-1].justify = "left"
    return table


@dataclass(frozen=True)
class _Rich:
    Group: Any
    Table: Any


def _rich() -> _Rich:
    """Returns what is used of rich.

    Raises:
        StrategyError: it is not installed.
    """
    try:
        from rich.console import Group  # noqa: PLC0415  # an extra
        from rich.table import Table  # noqa: PLC0415
    except ImportError as error:
        raise StrategyError("top needs rich", hint="pip install 'jaxfleet[watch]'") from error
    return _Rich(Group, Table)
