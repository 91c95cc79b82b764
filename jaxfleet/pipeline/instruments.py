"""Instruments that keep what they saw: times, counts of operators, and the stages themselves."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from jaxfleet.ir import Program
from jaxfleet.pipeline.stage import Stage
from jaxfleet.pipeline.tables import table


class Timing:
    """Keeps how long each pass took."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, float]] = []  # name, of the pass, of the verifier

    def __call__(self, stage: Stage) -> None:
        self.rows.append((stage.name, stage.seconds, stage.verify_seconds))

    def __str__(self) -> str:
        times = [("total", *self.total), *self.rows]
        lines = [(name, _milliseconds(ran), _milliseconds(checked)) for name, ran, checked in times]
        return table([("pass", "ms", "verify ms"), *lines[1:], lines[0]], right=(1, 2))

    @property
    def total(self) -> tuple[float, float]:
        """Seconds that all passes took, and seconds that the verifier took."""
        return sum(row[1] for row in self.rows), sum(row[2] for row in self.rows)


class Statistics:
    """Counts operators by type, before the first pass and after the last."""

    def __init__(self) -> None:
        self.before: Counter[str] = Counter()
        self.after: Counter[str] = Counter()

    def __call__(self, stage: Stage) -> None:
        if stage.pass_ is None:
            self.before = count_types(stage.before)
        self.after = count_types(stage.after)

    def __str__(self) -> str:
        types = sorted(self.before.keys() | self.after.keys())
        rows = [_counts(name, self.before[name], self.after[name]) for name in types]
        total = _counts("total", self.before.total(), self.after.total())
        return table([("operator", "before", "after", "change"), *rows, total], right=(1, 2, 3))


class Record(Sequence[Stage]):
    """Keeps every stage, the input first. Programs share what no pass changed, so this is cheap."""

    def __init__(self, stages: Iterable[Stage] = ()) -> None:
        self._stages = list(stages)

    def __call__(self, stage: Stage) -> None:
        self._stages.append(stage)

    @overload
    def __getitem__(self, key: int | str) -> Stage: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[Stage]: ...
    def __getitem__(self, key: int | str | slice) -> Stage | Sequence[Stage]:
        """Returns a stage by its place, or the last one of a pass by the pass's name."""
        if not isinstance(key, str):
            return self._stages[key]
        for stage in reversed(self._stages):
            if stage.name == key:
                return stage
        raise KeyError(f"no pass '{key}' ran; these did: {', '.join(s.name for s in self)}")

    def __len__(self) -> int:
        return len(self._stages)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self._stages)

    def __str__(self) -> str:
        return index_table(self._stages)

    def __repr__(self) -> str:
        return f"Record({' -> '.join(stage.name for stage in self._stages)})"


def count_types(program: Program) -> Counter[str]:
    """Returns how many operators of each type a program has, in all blocks."""
    return Counter(op.type for block in program.blocks for op in block.ops)


def index_table(stages: Sequence[Stage]) -> str:
    """Returns one line a stage: whether it changed anything, operators, seconds, what it made."""
    return table(map(_index_row, stages), right=(2, 4))


def _index_row(stage: Stage) -> tuple[str, ...]:
    if stage.pass_ is None:
        return (stage.label, "", "", f"{stage.after.op_count} ops", "", "")
    made = ", ".join(f"{count} {name}" for name, count in sorted(stage.made.items()))
    return (
        stage.label,
        "changed" if stage.changed else "unchanged",
        f"{stage.before.op_count} ->",
        f"{stage.after.op_count} ops",
        f"{stage.seconds:.3f} s",
        f"made {made}" if made else "",
    )


def _counts(name: str, before: int, after: int) -> tuple[str, str, str, str]:
    return name, str(before), str(after), f"{after - before:+}" if after != before else ""


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"
