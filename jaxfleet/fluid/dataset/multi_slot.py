"""The MultiSlot text format, parsed by two compiled passes over the bytes of whole lines."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxfleet.errors import FeedError
from jaxfleet.fluid.dataset.slots import Samples, Slot
from jaxfleet.tables.numba_jit import compiled, inlined

# Codes for the errors in a line, as returned by the first pass.
FINE, NOT_A_COUNT, TOO_FEW, NO_VALUES, NOT_WHOLE, TOO_LARGE, NOT_A_NUMBER, TOO_MANY = range(8)


_NEWLINE, _BLANK, _TAB, _RETURN = 10, 32, 9, 13
_ZERO, _NINE, _MINUS, _PLUS, _DOT = 48, 57, 45, 43, 46
_MOST = np.uint64(1) << np.uint64(63)  # the smallest value that exceeds int64


@inlined
def _skip_blanks(text: np.ndarray, at: int, end: int) -> int:
    while at < end and (text[at] == _BLANK or text[at] == _TAB or text[at] == _RETURN):
        at += 1
    return at


@inlined
def _word_end(text: np.ndarray, at: int, end: int) -> int:
    while at < end and not (
        text[at] == _BLANK or text[at] == _TAB or text[at] == _RETURN or text[at] == _NEWLINE
    ):
        at += 1
    return at


@inlined
def _whole(text: np.ndarray, at: int, end: int) -> tuple[np.int64, int]:
    """Returns a 64-bit integer, with or without a sign, and an error code.

    Numbers from 2**63 to 2**64 are keys of pslib (uint64): the int64 with the same bits.
    """
    negative = at < end and text[at] == _MINUS
    if negative or (at < end and text[at] == _PLUS):
        at += 1
    if at == end:
        return np.int64(0), NOT_WHOLE
    value, most = np.uint64(0), np.uint64(0xFFFFFFFFFFFFFFFF)
    for i in range(at, end):
        if text[i] < _ZERO or text[i] > _NINE:
            return np.int64(0), NOT_WHOLE
        digit = np.uint64(text[i] - _ZERO)
        if value > (most - digit) // np.uint64(10):
            return np.int64(0), TOO_LARGE
        value = value * np.uint64(10) + digit
    if negative:
        if value > _MOST:
            return np.int64(0), TOO_LARGE
        return np.int64(np.uint64(0) - value), FINE
    return np.int64(value), FINE


@inlined
def _power(ten: float, exponent: int) -> float:
    made = 1.0
    for _ in range(min(exponent, 400)):
        made *= ten
    return made


@inlined
def _real(text: np.ndarray, at: int, end: int) -> tuple[float, bool]:
    """Returns a decimal number with an optional exponent, and whether it is valid.

    Digits beyond 18 do not affect a float32. `nan` and `inf` are not valid.
    """
    negative = at < end and text[at] == _MINUS
    if negative or (at < end and text[at] == _PLUS):
        at += 1
    digits, seen, scale, any_digit, after_point = np.int64(0), 0, 0, False, False
    while at < end:
        byte = text[at]
        if byte == _DOT and not after_point:
            after_point = True
        elif _ZERO <= byte <= _NINE:
            any_digit = True
            if seen < 18:
                digits = np.int64(digits * 10 + np.int64(byte - _ZERO))
                seen += int(digits > 0)
                scale -= int(after_point)
            else:
                scale += int(not after_point)
        else:
            break
        at += 1
    if not any_digit:
        return 0.0, False
    if at < end:
        if text[at] != 101 and text[at] != 69:  # e, E
            return 0.0, False
        exponent, wrong = _whole(text, at + 1, end)
        if wrong != FINE or exponent > 10_000 or exponent < -10_000:
            return 0.0, False
        scale += int(exponent)
    value = float(digits)
    value = value * _power(10.0, scale) if scale > 0 else value / _power(10.0, -scale)
    return -value if negative else value, True


@inlined
def _count_is(text: np.ndarray, at: int, stop: int) -> tuple[np.int64, int]:
    """Returns the number of values in a slot, and an error code."""
    if stop == at:
        return np.int64(0), TOO_FEW
    number, wrong = _whole(text, at, stop)
    if wrong != FINE or number < 0:
        return number, NOT_A_COUNT
    return number, FINE if number > 0 else NO_VALUES


@inlined
def _value_is(text: np.ndarray, at: int, stop: int, is_real: bool) -> int:
    """Returns the error code of a value."""
    if stop == at:
        return TOO_FEW
    if is_real:
        return FINE if _real(text, at, stop)[1] else NOT_A_NUMBER
    wrong: int = _whole(text, at, stop)[1]
    return wrong


@compiled("u8[]", "b1[]", "i32[,]!")
def count_values(
    text: np.ndarray, is_real: np.ndarray, counts: np.ndarray
) -> tuple[int, int, int, int]:
    """Counts the values of each slot of each line of `text`, uint8[n], whole lines.

    `is_real`, bool[slots], is whether each slot has real numbers. `counts`, int32[lines, slots], is
    the output; empty lines take no row. Returns the number of nonempty lines; then the first error:
    its code (`FINE` for none), the number of its line from 0, and its slot.
    """
    at, end, line, row = 0, len(text), 0, 0
    while at < end:
        at = _skip_blanks(text, at, end)
        if at < end and text[at] == _NEWLINE:
            at, line = at + 1, line + 1
            continue
        if at >= end:
            break
        for slot in range(len(is_real)):
            stop = _word_end(text, at, end)
            number, wrong = _count_is(text, at, stop)
            if wrong != FINE:
                return row, wrong, line, slot
            at = _skip_blanks(text, stop, end)
            for _ in range(number):
                stop = _word_end(text, at, end)
                wrong = _value_is(text, at, stop, is_real[slot])
                if wrong != FINE:
                    return row, wrong, line, slot
                at = _skip_blanks(text, stop, end)
            counts[row, slot] = number
        if at < end and text[at] != _NEWLINE:
            return row, TOO_MANY, line, len(is_real) - 1
        at, line, row = at + 1, line + 1, row + 1
    return row, FINE, line, 0


@compiled("u8[]", "b1[]", "i32[,]", "i64[]!", "i64[]!", "f32[]!")
def read_values(
    text: np.ndarray,
    is_real: np.ndarray,
    counts: np.ndarray,
    places: np.ndarray,
    wholes: np.ndarray,
    reals: np.ndarray,
) -> None:
    """Writes the values of lines that `count_values` found valid to `wholes` and `reals`.

    `places`, int64[slots], is the start of each slot's values in these, and is modified.
    """
    at, end = 0, len(text)
    for row in range(len(counts)):
        while text[at] == _NEWLINE or text[at] == _BLANK or text[at] == _TAB or text[at] == _RETURN:
            at += 1
        for slot in range(len(is_real)):
            at = _skip_blanks(text, _word_end(text, at, end), end)
            for _ in range(counts[row, slot]):
                stop = _word_end(text, at, end)
                if is_real[slot]:
                    reals[places[slot]] = np.float32(_real(text, at, stop)[0])
                else:
                    wholes[places[slot]] = _whole(text, at, stop)[0]
                places[slot] += 1
                at = _skip_blanks(text, stop, end)


_WRONG = {
    NOT_A_COUNT: "does not begin with how many values it has",
    TOO_FEW: "has fewer values than its count, or is missing",
    NO_VALUES: "has 0 values",
    NOT_WHOLE: "has a value that is no whole number",
    TOO_LARGE: "has a value that does not fit 64 bits",
    NOT_A_NUMBER: "has a value that is no number",
    TOO_MANY: "is the last, and more follows it",
}
_HINTS = {
    NO_VALUES: "whoever writes the file pads such a slot, with a key of its own or 0",
    TOO_MANY: "set_use_var lists one variable for each slot of a line, in their order",
}
_FORM = "a line is '<count> <value> ...' for each variable of set_use_var, in their order"
_SHOWN = 100  # characters of a line in an error


def parse(text: bytes, slots: Sequence[Slot], file: str, first_line: int = 1) -> Samples:
    """Parses whole lines, skipping empty ones; errors name the file and line.

    Raises FeedError if a line is not a valid sample.
    """
    data = np.frombuffer(text, np.uint8)
    is_real = np.array([slot.is_real for slot in slots], bool)
    most = text.count(b"\n") + 1
    counts = np.empty((most, len(slots)), np.int32)
    rows, wrong, line, at = count_values(data, is_real, counts)
    if wrong != FINE:
        said = _WRONG[int(wrong)]
        raise _error(text, file, int(line), first_line, slots[at], said, _HINTS.get(int(wrong)))
    counts = counts[:rows].copy()
    _check_sizes(text, slots, counts, file, first_line)
    return Samples(tuple(slots), _values(data, is_real, counts), counts)


def parse_named(
    text: bytes, slots: Sequence[Slot], file: str, first_line: int, groups: int
) -> Samples:
    """Parses samples whose lines begin with `1 <id>`, and with `1 <content>` if `groups` is 2."""
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
    read_values(data, is_real, counts, begins.copy(), wholes, reals)
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
    """Returns the line number from 0 of a sample, counting empty lines."""
    full = (at for at, line in enumerate(text.split(b"\n")) if line.strip())
    return next(at for number, at in enumerate(full) if number == row)


def _error(
    text: bytes, file: str, line: int, first: int, slot: Slot, said: str, hint: str | None
) -> FeedError:
    shown = text.split(b"\n")[line].decode("utf-8", "replace").strip()
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
    what = f"{file}, line {first + line}: slot '{slot.name}' {said}"
    return FeedError(f"{what}\n    {shown}", hint=hint or _FORM)
