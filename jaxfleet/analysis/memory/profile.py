"""The memory profile of a step: the bytes alive at each operator, and the peak."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxfleet.analysis.memory.costs import TemporaryBytes
from jaxfleet.analysis.memory.live_ranges import (
    InnerPeaks,
    LiveRange,
    executables,
    fused_ranges,
    live_ranges,
)
from jaxfleet.ir import Program

_UNITS = ("B", "kB", "MB", "GB", "TB")
_SHOWN = 12  # values of the peak that are shown by default


@dataclass(frozen=True)
class MemoryProfile:
    """The bytes that a step holds while each operator of block 0 runs.

    Where the step is cut, an executable holds its inputs and its outputs for other executables from
    its first operator to its last.
    """

    bytes: tuple[int, ...]  # by operator, in their order
    # all values, with their lifetimes inside the program
    values: tuple[LiveRange, ...] = field(repr=False)
    # by value, the first place at which it is held, and the place after the last
    spans: tuple[tuple[int, int], ...] = field(repr=False)
    program: Program = field(repr=False)

    @property
    def peak(self) -> int:
        return max(self.bytes, default=0)

    @property
    def peak_at(self) -> int:
        """The place of the first operator at which the peak is reached."""
        return self.bytes.index(self.peak) if self.bytes else 0

    def alive(self, place: int) -> list[LiveRange]:
        """Returns the values alive while an operator runs, the largest first."""
        found = [
            value
            for value, (begin, end) in zip(self.values, self.spans, strict=True)
            if value.bytes and begin <= place < end
        ]
        return sorted(found, key=lambda value: -value.bytes)

    def text(self, *, most: int = _SHOWN) -> str:
        """Describes the peak: its operator, and the largest values alive there."""
        if not self.bytes:
            return f"program '{self.program.name}' has no operators"
        at, ops = self.peak_at, self.program.root.ops
        alive = self.alive(at)
        inner = self.peak - sum(value.bytes for value in alive)
        head = f"peak {size_text(self.peak)} at operator {at} of {len(ops)}, {ops[at].type}"
        lines = [f"{head} ({ops[at].role.value}){self._line_of(at)}"]
        lines += [self._value_text(value) for value in alive[:most]]
        if len(alive) > most:
            rest = sum(value.bytes for value in alive[most:])
            lines.append(f"  {size_text(rest):>9}  {len(alive) - most} more values")
        if inner:
            lines.append(f"  {size_text(inner):>9}  inside its sub-blocks")
        return "\n".join(lines)

    def _value_text(self, value: LiveRange) -> str:
        variable = self.program.lookup(value.name)
        return f"  {size_text(value.bytes):>9}  {variable}{self._line_of(value.made)}"

    def _line_of(self, place: int) -> str:
        line = self.program.root.ops[place].source.place()
        return f"  {line}" if line else ""


def memory_profile(
    program: Program,
    sizes: Mapping[str, int],
    *,
    keep: Iterable[str] = (),
    merges: bool = True,
) -> MemoryProfile:
    """Returns the bytes that a program holds at each operator of block 0.

    Temporaries of a sub-block count while its operator runs. `sizes` has a number for every letter;
    a missing one is a PassError. Variables in `keep` are fetched by name, so returned. `merges` is
    whether the compiler merges operators, as XLA does, or each runs by itself.
    """
    counted = TemporaryBytes(program, sizes, keep=keep)
    values, inner = live_ranges(program, counted), InnerPeaks(program, counted)
    values = fused_ranges(program, values) if merges else values
    spans = _spans(program, values)
    steps = [0] * (len(program.root.ops) + 1)
    for value, (begin, end) in zip(values, spans, strict=True):
        steps[begin] += value.bytes
        steps[end] -= value.bytes
    held, total = [], 0
    for step, op in zip(steps, program.root.ops, strict=False):
        total += step
        held.append(total + inner.of(op.blocks))
    return MemoryProfile(tuple(held), tuple(values), tuple(spans), program)


def _spans(program: Program, values: Sequence[LiveRange]) -> list[tuple[int, int]]:
    """Returns the first and the last place at which each value is held."""
    runs_in = executables(program.root.ops)
    first = {number: place for place, number in reversed(list(enumerate(runs_in)))}
    behind = {number: place + 1 for place, number in enumerate(runs_in)}
    found = []
    for value in values:
        begin, end = max(0, value.made), value.last + (0 if value.is_overwritten else 1)
        if value.bytes and runs_in[value.made] != runs_in[value.last]:
            begin, end = first[runs_in[value.made]], behind[runs_in[value.last]]
        found.append((begin, end))
    return found


def size_text(size: float) -> str:
    """Formats a number of bytes: `12.3 MB`."""
    unit = 0
    while abs(size) >= 999.5 and unit < len(_UNITS) - 1:  # 999.5 would print as 1e+03
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"
