"""The bytes that a step holds at each of its operators, the most of them, and what they are."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxfleet.analysis.memory.liveness import InnerPeaks, Value, values_of
from jaxfleet.analysis.memory.merging import executables, merged
from jaxfleet.analysis.memory.sizes import Counted
from jaxfleet.ir import Program

_UNITS = ("B", "kB", "MB", "GB", "TB")
_SHOWN = 12  # values of the peak, unless asked for more


@dataclass(frozen=True)
class Curve:
    """What a step holds while each operator of block 0 runs.

    Where the step is cut, an executable holds all that it is given and all that it makes for
    others from its first operator to its last.

    Attributes:
        bytes: by operator, in their order.
        values: all values, with their lifetimes inside the program.
        spans: by value, the first place at which it is held, and the place behind the last.
        program: it.
    """

    bytes: tuple[int, ...]
    values: tuple[Value, ...] = field(repr=False)
    spans: tuple[tuple[int, int], ...] = field(repr=False)
    program: Program = field(repr=False)

    @property
    def peak(self) -> int:
        """The most that is held."""
        return max(self.bytes, default=0)

    @property
    def peak_at(self) -> int:
        """The place of the operator at which most is held, the first of them."""
        return self.bytes.index(self.peak) if self.bytes else 0

    def alive(self, place: int) -> list[Value]:
        """Returns what is alive while an operator runs, the largest first."""
        found = [
            value
            for value, (begin, end) in zip(self.values, self.spans, strict=True)
            if value.bytes and begin <= place < end
        ]
        return sorted(found, key=lambda value: -value.bytes)

    def text(self, *, most: int = _SHOWN) -> str:
        """Returns the peak in words: where, and the largest values that are alive there."""
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

    def _value_text(self, value: Value) -> str:
        variable = self.program.lookup(value.name)
        return f"  {size_text(value.bytes):>9}  {variable}{self._line_of(value.made)}"

    def _line_of(self, place: int) -> str:
        line = self.program.root.ops[place].source.place()
        return f"  {line}" if line else ""


def curve_of(
    program: Program,
    sizes: Mapping[str, int],
    *,
    keep: Iterable[str] = (),
    merges: bool = True,
) -> Curve:
    """Returns what a program holds at each operator of block 0.

    What a sub-block holds of its own counts while its operator runs.

    Args:
        program: any.
        sizes: a number for every letter.
        keep: variables that are fetched by name, so returned.
        merges: whether the compiler merges operators, as XLA does, or each runs by itself.

    Raises:
        PassError: a letter has no number.
    """
    counted = Counted(program, sizes, keep=keep)
    values, inner = values_of(program, counted), InnerPeaks(program, counted)
    values = merged(program, values) if merges else values
    spans = _spans(program, values)
    steps = [0] * (len(program.root.ops) + 1)
    for value, (begin, end) in zip(values, spans, strict=True):
        steps[begin] += value.bytes
        steps[end] -= value.bytes
    held, total = [], 0
    for step, op in zip(steps, program.root.ops, strict=False):
        total += step
        held.append(total + inner.of(op.blocks))
    return Curve(tuple(held), tuple(values), tuple(spans), program)


def _spans(program: Program, values: Sequence[Value]) -> list[tuple[int, int]]:
    """Returns from where to where each value is held."""
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
    """Returns a number of bytes as it is read: `12.3 MB`."""
    unit = 0
    while abs(size) >= 999.5 and unit < len(_UNITS) - 1:  # which would be read as 1e+03
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"
