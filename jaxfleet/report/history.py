"""The input of a report: the stages of a program, from a record, a dump or a text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxfleet.ir import Program
from jaxfleet.pipeline import Record, pass_text

UNKNOWN_S = -1.0


@dataclass(frozen=True)
class StageRecord:
    """One stage of a pipeline.

    Attributes:
        name: the pass; `input` for the first stage.
        program: the program after it.
        options: the pass with its options, as text.
        seconds: its run time; negative if unknown.
        verify_seconds: the verifier's; negative if unknown.
    """

    name: str
    program: Program
    options: str = ""
    seconds: float = UNKNOWN_S
    verify_seconds: float = UNKNOWN_S


@dataclass(frozen=True)
class TimePart:
    """What a kind of work took in a step, as training ran it."""

    what: str
    seconds: float


@dataclass(frozen=True)
class Measured:
    """What a step and its devices were measured to do.

    Attributes:
        flops_per_s: of one device, in a product of two matrices, while all devices work.
        bytes_per_s: of one device, that a copy reads and writes, likewise.
        device: what it is.
        step_s: the median time of a call; None if it was not measured.
        calls: the number of calls that were timed.
        why_not: why it was not measured.
        note: what the calls do otherwise than those of training.
        of: what the calls run, if it is not all of a step.
        parts: the whole of a training step, and its parts; empty if none was recorded.
        steps: the number of training steps whose medians these are.
    """

    flops_per_s: float
    bytes_per_s: float
    device: str
    step_s: float | None = None
    calls: int = 0
    why_not: str = ""
    note: str = ""
    of: str = ""
    parts: Sequence[TimePart] = ()
    steps: int = 0


@dataclass(frozen=True)
class History:
    """The stages of one program, with what is known beyond them.

    Attributes:
        label: distinguishes the program from others of its name.
        stages: the input first; at least one.
        decisions: lines of `explain()`.
        notes: of the capture.
        facts: names with values.
        rows: of the whole batch; None if unknown.
        fetched: variables that the step returns beside its state.
        budget_bytes: the memory budget; None without one.
        fitted_by: the first pass that the budget caused; empty without one.
        sources: the lines of the user's files, by path and number.
        measured: times; None if nothing was measured.
        why_unmeasured: why nothing was, and how it would be; empty of a step in this process.
        xla_bytes: XLA's peak of the step as it runs; None if it has not compiled.
        xla_bytes_before: likewise, without the memory budget.
    """

    label: str
    stages: Sequence[StageRecord]
    decisions: Sequence[str] = ()
    notes: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()
    rows: int | None = None
    fetched: Sequence[str] = ()
    budget_bytes: int | None = None
    fitted_by: str = ""
    sources: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    measured: Measured | None = None
    why_unmeasured: str = ""
    xla_bytes: int | None = None
    xla_bytes_before: int | None = None

    @property
    def last(self) -> Program:
        """The program after all passes."""
        return self.stages[-1].program

    @property
    def divided_at(self) -> int | None:
        """The stage that divides the program among devices or trainers; None without one."""
        for place, stage in enumerate(self.stages):
            if "devices" in stage.program.attrs:
                return place
        return None


def of_program(program: Program, label: str = "") -> History:
    """Returns the history of a program without passes."""
    return History(label, (StageRecord("input", program),))


def of_record(record: Record) -> tuple[StageRecord, ...]:
    """Returns the stages of a pipeline that ran in this process."""
    return tuple(
        StageRecord(
            stage.name,
            stage.after,
            "" if stage.pass_ is None else pass_text(stage.pass_),
            stage.seconds,
            stage.verify_seconds,
        )
        for stage in record
    )
