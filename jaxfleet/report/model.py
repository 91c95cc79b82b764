"""The data of a report as plain dataclasses; `serialization` writes them for the page.

A step of 5,000 operators and ten passes must fit 2 MB, so a report has no text of a program. It
has every operator once, with a version for each pass that changed its text; every string once;
and for each pass only the difference between its order of lines and the order before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jaxfleet.report.history import Measured

NONE = -1  # in columns of numbers: there is no such thing

Operands: TypeAlias = list[Any]  # numbers of variables, ~number of a literal's text, [slot, ...]
Order: TypeAlias = list[Any]  # [start, count] of the order before, or the number of a line


class Strings:
    """Interned strings: a number for each, in order of their first use."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """Returns the number of a string, and adds it if it is new."""
        found = self._numbers.get(text)
        if found is None:
            found = self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return found


@dataclass(frozen=True)
class Version:
    """The text of a line from one stage on. All strings are interned.

    Attributes:
        stage: the first stage that has it.
        role: of the operator.
        type: the operator's type; of another line, all of its text.
        outputs: what it writes.
        inputs: what it reads.
        attrs: its attributes as text; `NONE` without any.
        pairs: variables of (parameter, gradient) pairs, flat.
    """

    stage: int
    role: int
    type: int
    outputs: Operands
    inputs: Operands
    attrs: int = NONE
    pairs: tuple[int, ...] = ()

    def same_text(self, other: "Version") -> bool:
        """Whether both print alike."""
        mine = (self.role, self.type, self.outputs, self.inputs, self.attrs, self.pairs)
        return mine == (
            other.role, other.type, other.outputs, other.inputs, other.attrs, other.pairs,
        )  # fmt: skip


@dataclass
class Line:
    """A line of a program through all of its passes: mostly an operator.

    Attributes:
        kind: `op`, or `program`, `block` or `declaration`.
        file: number of the user's file; `NONE` if unknown.
        line: the line there.
        function: the function around it, interned.
        scope: the modules around it, interned.
        maker: the pass that made it, interned; `NONE` if the user wrote it.
        caller: the innermost of the calls that lead to the function; `NONE` without any.
        versions: its texts, in order of the stages.
        labels: how each output lies on the devices, interned.
        completed: the reductions that complete its outputs, interned.
        flops: of a matrix product or convolution; `NONE` of anything else.
        moved_bytes: what it sends or reduces; `NONE` if it does not communicate.
    """

    kind: str
    file: int = NONE
    line: int = 0
    function: int = NONE
    scope: int = NONE
    maker: int = NONE
    caller: int = NONE
    versions: list[Version] = field(default_factory=list)
    labels: tuple[int, ...] = ()
    completed: tuple[int, ...] = ()
    flops: int = NONE
    moved_bytes: int = NONE


@dataclass(frozen=True)
class Stage:
    """The program after one pass, or before all of them.

    Attributes:
        name: the pass.
        options: the pass with its options, as text.
        seconds: its run time; negative if unknown.
        verify_seconds: the verifier's; negative if unknown.
        order: its lines, as edits of the order before.
        moved: lines that stand elsewhere than before.
        counts: numbers of operators added, removed, changed, retyped and moved, and in all.
    """

    name: str
    options: str
    seconds: float
    verify_seconds: float
    order: Order
    moved: tuple[int, ...]
    counts: tuple[int, int, int, int, int, int]


@dataclass(frozen=True)
class SourceFile:
    """A file of the user's program.

    Attributes:
        path: as messages print it.
        lines: by number, those that operators come from, with lines around them.
    """

    path: str
    lines: Mapping[int, str]


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes alive over the operators of one stage: of block 0, and of a turn of its sub-blocks.

    Attributes:
        title: which program it is of.
        xla_bytes: XLA's own peak of it; `NONE` if it is not known.
        bytes: by operator.
        ops: its line, by operator.
        values: (variable, bytes, first place, place after the last, place that makes it) of each;
            where the step is cut, a value is held from the start of its executable.
    """

    title: str
    bytes: Sequence[int]
    ops: Sequence[int]
    values: Sequence[tuple[int, int, int, int, int]]
    xla_bytes: int = NONE


@dataclass(frozen=True)
class JourneyStep:
    """One station of a parameter's way through a step.

    Attributes:
        what: `use`, `gradient`, `reduce`, `slice`, `send`, `update`, `receive` or `join`.
        line: the operator; `NONE` if it has none.
        text: what the operator does not show.
        program: the number of the program that contains the operator; `NONE` for the same one.
    """

    what: str
    line: int
    text: str = ""
    program: int = NONE


@dataclass(frozen=True)
class Journey:
    """The way of a parameter: from its uses to its gradient, servers, update and back.

    Attributes:
        param: its variable.
        state_bytes: of its optimizer's state.
        state: the leaves of that state.
        steps: in order.
    """

    param: int
    state_bytes: int
    state: tuple[str, ...]
    steps: tuple[JourneyStep, ...]


@dataclass(frozen=True)
class LinkKind:
    """Links between devices that send alike.

    Attributes:
        says: which links these are.
        links: their number.
        bytes: of each, in a step.
        operators: the collectives that use them.
    """

    says: str
    links: int
    bytes: int
    operators: int


@dataclass(frozen=True)
class DeviceLinks:
    """What collectives send between the devices, or ranks, of a step.

    Attributes:
        devices: their number.
        kinds: the links, by kind.
        links: (from, to, bytes in a step) of each; empty with many devices.
        unknown: collectives of an unknown size, which are not counted.
    """

    devices: int
    kinds: tuple[LinkKind, ...]
    links: tuple[tuple[int, int, int], ...]
    unknown: int = 0


@dataclass(frozen=True)
class Traffic:
    """What servers hold and what travels, as `jaxfleet plan --json` prints it.

    Attributes:
        placed: the plan of the step as it is; None if it has no servers.
        imagined: plans for other numbers of servers.
        why_none: why there is no such plan, or empty.
        devices: what collectives send; None if nothing.
    """

    placed: Mapping[str, Any] | None = None
    imagined: Sequence[Mapping[str, Any]] = ()
    why_none: str = ""
    devices: DeviceLinks | None = None


@dataclass
class ReportProgram:
    """One program with its passes.

    Attributes:
        name: the program's.
        label: distinguishes it from others of that name: its folder.
        role: `step`, `trainer`, `server`, `startup` or `program`.
        decisions: lines of `explain()`.
        notes: what was refused or fell back, and why.
        facts: names with values.
        sizes: the number that stands for each letter in bytes and flops.
        sizes_assumed: whether those numbers are guesses.
        files: the user's.
        frames: calls of the user's functions: (file, line, interned function, frame around it).
        variables: (name, type, kind, bytes, interned type and kind).
        lines: all lines of all stages.
        stages: the input first.
        memory: curves, the original step first.
        budget_bytes: the memory budget; `NONE` without one.
        journeys: of each parameter.
        traffic: between trainers and servers.
        endpoint: of a server's program.
        work: flops and bytes of a step on one device; None if they are not known.
        measured: times; None if nothing was measured.
        why_unmeasured: why nothing was, and how it would be.
    """

    name: str
    label: str
    role: str
    decisions: Sequence[str] = ()
    notes: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    sizes_assumed: bool = False
    files: Sequence[SourceFile] = ()
    frames: Sequence[tuple[int, int, int, int]] = ()
    variables: Sequence[tuple[str, int, int, int]] = ()
    lines: Sequence[Line] = ()
    stages: Sequence[Stage] = ()
    memory: Sequence[MemoryCurve] = ()
    budget_bytes: int = NONE
    journeys: Sequence[Journey] = ()
    traffic: Traffic = field(default_factory=Traffic)
    endpoint: str = ""
    work: tuple[int, int] | None = None
    measured: Measured | None = None
    why_unmeasured: str = ""


@dataclass(frozen=True)
class Report:
    """A whole report.

    Attributes:
        title: the page's.
        version: jaxfleet's.
        programs: the first is shown first.
        strings: the interned strings of all programs.
    """

    title: str
    version: str
    programs: Sequence[ReportProgram]
    strings: Strings
