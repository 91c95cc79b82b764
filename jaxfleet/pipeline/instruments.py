"""Stages of a pipeline run, and the instruments that observe them: times, counts, records."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias, overload

from jaxfleet import notebook
from jaxfleet.ir import Operator, Program, Role, print_folded, print_program, unified_diff
from jaxfleet.pipeline.base import Pass


def table(rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> str:
    """Returns rows as lines with aligned columns, two spaces apart.

    Args:
        rows: all of equal length.
        right: the columns, counted from 0, to align right: those of numbers.
    """
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    ends = set(right)

    def cell(at: int, text: str) -> str:
        return text.rjust(widths[at]) if at in ends else text.ljust(widths[at])

    return "\n".join("  ".join(map(cell, range(len(row)), row)).rstrip() for row in lines)


# Each of these moves data between devices or processes, or waits for such a transfer.
_COMMUNICATION = frozenset(
    {"send", "recv", "send_barrier", "fetch_barrier", "listen_and_serv", "prefetch", "push_rows"}
)


@dataclass(frozen=True)
class Stage:
    """One step of a pipeline run. The first stage has no pass: it is the pipeline's input.

    Attributes:
        index: 0 for the input; passes count from 1.
        pass_: the pass that ran, or None for the input.
        before: the program before the pass.
        after: the program after it.
        seconds: the pass's run time.
        verify_seconds: the time to verify its result.
    """

    index: int
    pass_: Pass | None
    before: Program
    after: Program
    seconds: float = 0.0
    verify_seconds: float = 0.0

    @property
    def name(self) -> str:
        return self.pass_.name if self.pass_ is not None else "input"

    @property
    def label(self) -> str:
        """The stage's name in file names: `01_grad_allreduce`."""
        return f"{self.index:02}_{self.name}"

    def __repr__(self) -> str:
        change = "changed" if self.changed else "unchanged"
        return f"Stage({self.label}: {self.after!r}, {change})"

    @cached_property
    def changed(self) -> bool:
        return self.before is not self.after and self.before != self.after

    @cached_property
    def made(self) -> Counter[str]:
        """The number of operators of each type that are marked as made by the pass."""
        if self.pass_ is None:
            return Counter()
        return _made_by(self.name, self.after) - _made_by(self.name, self.before)

    @cached_property
    def text(self) -> str:
        """The program after the pass, folded to communication and the operators the pass made."""
        return print_folded(self.after, keep=self.keeps, source=True)

    @cached_property
    def full_text(self) -> str:
        """The full program after the pass, with source lines; it can be parsed again."""
        return print_program(self.after, source=True)

    @cached_property
    def diff(self) -> str:
        """The pass's changes, as a unified diff of the full texts, without source lines."""
        return self.diff_text()

    def diff_text(self, *, source: bool = False) -> str:
        """Returns the same with the user's source lines as comments, if asked for."""
        return unified_diff(self.before, self.after, source=source)

    def keeps(self, op: Operator) -> bool:
        return communicates(op) or (self.pass_ is not None and op.source.made_by == self.name)


Instrument: TypeAlias = Callable[[Stage], None]


def communicates(op: Operator) -> bool:
    """Whether an operator moves data between devices or processes."""
    by_role = op.role in {Role.RPC, Role.DIST}
    return by_role or op.type.startswith("c_") or op.type in _COMMUNICATION


def _made_by(name: str, program: Program) -> Counter[str]:
    return Counter(
        op.type for block in program.blocks for op in block.ops if op.source.made_by == name
    )


class Timing:
    """Records the run time of each pass."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, float]] = []  # name, seconds of the pass, of the verifier

    def __call__(self, stage: Stage) -> None:
        self.rows.append((stage.name, stage.seconds, stage.verify_seconds))

    def __str__(self) -> str:
        times = [("total", *self.total), *self.rows]
        lines = [(name, _milliseconds(ran), _milliseconds(checked)) for name, ran, checked in times]
        return table([("pass", "ms", "verify ms"), *lines[1:], lines[0]], right=(1, 2))

    @property
    def total(self) -> tuple[float, float]:
        """Total seconds of all passes, and of the verifier."""
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
    """Keeps every stage, the input first. Unchanged programs are shared, so this is cheap.

    Attributes:
        folder: the folder of the same run's dump; None if it was not dumped.
    """

    def __init__(self, stages: Iterable[Stage] = ()) -> None:
        self._stages = list(stages)
        self.folder: Path | None = None

    def __call__(self, stage: Stage) -> None:
        self._stages.append(stage)

    @overload
    def __getitem__(self, key: int | str) -> Stage: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[Stage]: ...
    def __getitem__(self, key: int | str | slice) -> Stage | Sequence[Stage]:
        """Returns a stage by its index, or the last one of a pass by the pass's name."""
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

    def _repr_html_(self) -> str:
        rows = [
            (
                stage.label,
                f"{stage.before.op_count:,}",
                f"{stage.after.op_count:,}",
                "changed" if stage.changed or stage.pass_ is None else "unchanged",
                f"{1000 * stage.seconds:.1f}",
            )
            for stage in self._stages
        ]
        heads = "pass", "operators before", "after", "program", "ms"
        name = self._stages[-1].after.name if self._stages else "empty"
        where = [f"dumped to {self.folder}"] if self.folder is not None else []
        how = 'step.dumps["NAME"].diff is what a pass changed, step.view(path) shows all of them'
        return notebook.shown(
            notebook.head("Record", name, *where),
            notebook.cut_table(rows, heads=heads, right=(1, 2, 4)),
            notebook.element("div", how, class_="p"),
        )


def count_types(program: Program) -> Counter[str]:
    """Returns the number of operators of each type in all blocks of a program."""
    return Counter(op.type for block in program.blocks for op in block.ops)


def index_table(stages: Sequence[Stage]) -> str:
    """Returns one line per stage: changed or not, operators, seconds, operators it made."""
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
