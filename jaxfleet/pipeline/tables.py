"""Lines up rows of words, for the tables that instruments print."""

from collections.abc import Iterable, Sequence


def table(rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> str:
    """Returns rows as lines with their columns aligned, two spaces between.

    Args:
        rows: all of one length.
        right: the columns, counted from 0, that end on one edge: those of numbers.
    """
    lines = list(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    ends = set(right)

    def cell(at: int, text: str) -> str:
        return text.rjust(widths[at]) if at in ends else text.ljust(widths[at])

    return "\n".join("  ".join(map(cell, range(len(row)), row)).rstrip() for row in lines)
