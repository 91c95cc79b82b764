"""Calls of the user's functions as numbers: a tree of frames, for data beside a program's text."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from jaxfleet.ir.program import Program
from jaxfleet.ir.source import Frame, short_path

NO_FRAME = -1
Row = tuple[str, int, str, int]  # file by its short path, line, function, the row of its caller


@dataclass
class FrameTable:
    """Frames, each once for each way that leads to it.

    Attributes:
        rows: the frames; a caller stands before what it calls.
    """

    rows: list[Row] = field(default_factory=list)
    _numbers: dict[Row, int] = field(default_factory=dict)
    _known: dict[tuple[Frame, ...], int] = field(default_factory=dict)

    def number(self, callers: tuple[Frame, ...]) -> int:
        """Returns the row of the innermost of these calls; `NO_FRAME` without any."""
        if callers not in self._known:
            at = NO_FRAME
            for frame in callers:
                row = (short_path(frame.file), frame.line, frame.function, at)
                at = self._numbers.setdefault(row, len(self.rows))
                if at == len(self.rows):
                    self.rows.append(row)
            self._known[callers] = at
        return self._known[callers]

    def numbers(self, program: Program) -> list[int]:
        """Returns the number of every operator's calls, block by block."""
        return [self.number(op.source.callers) for block in program.blocks for op in block.ops]


def with_frames(program: Program, rows: Sequence[Row], numbers: Iterable[int]) -> Program:
    """Returns a program whose operators have the calls that `FrameTable.numbers` gave of it.

    Numbers of no row mean no calls: a file beside a text may have been edited by hand.
    """
    callers_of, given = _callers(rows), iter(numbers)
    blocks = []
    for block in program.blocks:
        ops = []
        for op in block.ops:
            callers = callers_of(next(given, NO_FRAME))
            ops.append(replace(op, source=replace(op.source, callers=callers)) if callers else op)
        blocks.append(block.with_ops(ops))
    return program.with_blocks(blocks)


def _callers(rows: Sequence[Row]) -> Callable[[int], tuple[Frame, ...]]:
    chains: list[tuple[Frame, ...]] = []
    for file, line, function, caller in rows:
        around = chains[caller] if 0 <= caller < len(chains) else ()
        chains.append((*around, Frame(file, line, function)))
    return lambda number: chains[number] if 0 <= number < len(chains) else ()
