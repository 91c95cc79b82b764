"""Shows what two programs' texts differ in, as a unified diff."""

from collections.abc import Iterator, Sequence

from jaxfleet.ir.matching import Pairs, match
from jaxfleet.ir.program import Program
from jaxfleet.ir.text import print_program


def unified_diff(before: Program, after: Program, *, context: int = 3, source: bool = False) -> str:
    """Returns the difference of two programs' texts, empty where they print alike.

    Args:
        before: the first program.
        after: the second program.
        context: how many equal lines to show around what differs.
        source: add the user's source lines as comments; they can differ too then.
    """
    texts = [print_program(program, source=source).split("\n") for program in (before, after)]
    hunks = list(_hunks(texts[0], texts[1], context))
    return "\n".join([f"--- {before.name}", f"+++ {after.name}", *hunks]) if hunks else ""


def _hunks(a: Sequence[str], b: Sequence[str], context: int) -> Iterator[str]:
    for near in _grouped(_changes(match(a, b), len(a), len(b)), 2 * context):
        before = min(context, near[0][0].start)
        after = min(context, len(a) - near[-1][0].stop)
        whole_a = range(near[0][0].start - before, near[-1][0].stop + after)
        whole_b = range(near[0][1].start - before, near[-1][1].stop + after)
        yield f"@@ -{_span(whole_a)} +{_span(whole_b)} @@"
        at = whole_a.start
        for gone, new in near:
            yield from (f" {line}" for line in a[at : gone.start])
            yield from (f"-{line}" for line in a[gone.start : gone.stop])
            yield from (f"+{line}" for line in b[new.start : new.stop])
            at = gone.stop
        yield from (f" {line}" for line in a[at : whole_a.stop])


def _changes(pairs: Pairs, len_a: int, len_b: int) -> Iterator[tuple[range, range]]:
    """Yields what lies between matches: lines of the first that went, of the second that came."""
    i = j = 0
    for next_i, next_j in [*pairs, (len_a, len_b)]:
        if next_i > i or next_j > j:
            yield range(i, next_i), range(j, next_j)
        i, j = next_i + 1, next_j + 1


def _grouped(
    changes: Iterator[tuple[range, range]], apart: int
) -> Iterator[list[tuple[range, range]]]:
    """Yields runs of changes that lie no more lines apart than this."""
    near: list[tuple[range, range]] = []
    for change in changes:
        if near and change[0].start - near[-1][0].stop > apart:
            yield near
            near = []
        near.append(change)
    if near:
        yield near


def _span(lines: range) -> str:
    """Returns lines as unified diffs count them: from 1, and an empty span by the line before."""
    start = lines.start + 1 if lines else lines.start
    return str(start) if len(lines) == 1 else f"{start},{len(lines)}"
