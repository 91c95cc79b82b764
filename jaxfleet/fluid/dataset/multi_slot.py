"""The MultiSlot text format: whole lines become samples, or an error that names the line."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxfleet.errors import FeedError
from jaxfleet.fluid.dataset import scan
from jaxfleet.fluid.dataset.slots import Samples, Slot

_WRONG = {
    scan.NOT_A_COUNT: "does not begin with how many values it has",
    scan.TOO_FEW: "has fewer values than it says, or is missing",
    scan.NO_VALUES: "has 0 values",
    scan.NOT_WHOLE: "has a value that is no whole number",
    scan.TOO_LARGE: "has a value that does not fit 64 bits",
    scan.NOT_A_NUMBER: "has a value that is no number",
    scan.TOO_MANY: "is the last, and more follows it",
}
_HINTS = {
    scan.NO_VALUES: "whoever writes the file pads such a slot, with a key of its own or 0",
    scan.TOO_MANY: "set_use_var lists one variable for each slot of a line, in their order",
}
_FORM = "a line is '<count> <value> ...' for each variable of set_use_var, in their order"
_SHOWN = 100  # characters of a line in an error


def parse(text: bytes, slots: Sequence[Slot], file: str, first_line: int = 1) -> Samples:
    """Reads samples.

    Args:
        text: whole lines; empty ones are passed over.
        slots: of each line, in their order.
        file: what it is of, for errors.
        first_line: the number of the first line, for errors.

    Raises:
        FeedError: a line is no sample.
    """
    data = np.frombuffer(text, np.uint8)
    is_real = np.array([slot.is_real for slot in slots], bool)
    most = text.count(b"\n") + 1
    counts = np.empty((most, len(slots)), np.int32)
    rows, wrong, line, at = scan.count(data, is_real, counts)
    if wrong != scan.FINE:
        said = _WRONG[int(wrong)]
        raise _error(text, file, int(line), first_line, slots[at], said, _HINTS.get(int(wrong)))
    counts = counts[:rows].copy()
    _check_sizes(text, slots, counts, file, first_line)
    return Samples(tuple(slots), _values(data, is_real, counts), counts)


def parse_named(
    text: bytes, slots: Sequence[Slot], file: str, first_line: int, groups: int
) -> Samples:
    """Reads samples whose lines begin with `1 <id>`, and perhaps `1 <content>`.

    Args:
        text: whole lines.
        slots: what follows on each line, in order.
        file: what it is of, for errors.
        first_line: the number of the first line, for errors.
        groups: how many of these stand before the slots: 1 or 2.

    Raises:
        FeedError: a line is not such a sample.
    """
    ids, rests = [], []
    for number, line in enumerate(text.split(b"\n"), first_line):
        words = line.split(maxsplit=2 * groups)
        if not words:
            rests.append(b"")
            continue
        if words[: 2 * groups : 2] != [b"1"] * groups or len(words) <= 2 * groups:
            what = f"{file}, line {number}: does not begin with '1 <id>'"
            hint = "set_parse_ins_id and set_parse_content each put '1 <word>' before the slots"
            raise FeedError(f"{what}: {line[:_SHOWN].decode(errors='replace')!r}", hint=hint)
        ids.append(words[1].decode(errors="replace"))
        rests.append(words[2 * groups])
    made = parse(b"\n".join(rests), slots, file, first_line)
    return replace(made, ids=np.array(ids, dtype=object))


def _values(data: np.ndarray, is_real: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, ...]:
    sizes = counts.sum(0, dtype=np.int64)
    ends = np.where(is_real, np.cumsum(sizes * is_real), np.cumsum(sizes * ~is_real))
    begins = ends - sizes
    wholes = np.empty(int(sizes[~is_real].sum()), np.int64)
    reals = np.empty(int(sizes[is_real].sum()), np.float32)
    scan.read(data, is_real, counts, begins.copy(), wholes, reals)
    return tuple(
        (reals if real else wholes)[begin:end]
        for real, begin, end in zip(is_real, begins, ends, strict=True)
    )


def _check_sizes(
    text: bytes, slots: Sequence[Slot], counts: np.ndarray, file: str, first_line: int
) -> None:
    for at, slot in enumerate(slots):
        if slot.size is None:
            continue
        other = np.flatnonzero(counts[:, at] != slot.size)
        if other.size:
            row = int(other[0])
            line = _line_of_row(text, row)
            said = f"has {counts[row, at]} values, and is declared with {slot.size}"
            hint = "declare it with lod_level=1 where samples have unequally many"
            raise _error(text, file, line, first_line, slot, said, hint)


def _line_of_row(text: bytes, row: int) -> int:
    """Returns the number from 0 of the line that holds a sample, empty ones counted."""
    full = (at for at, line in enumerate(text.split(b"\n")) if line.strip())
    return next(at for number, at in enumerate(full) if number == row)


def _error(
    text: bytes, file: str, line: int, first: int, slot: Slot, said: str, hint: str | None
) -> FeedError:
    shown = text.split(b"\n")[line].decode("utf-8", "replace").strip()
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
    what = f"{file}, line {first + line}: slot '{slot.name}' {said}"
    return FeedError(f"{what}\n    {shown}", hint=hint or _FORM)
