"""Reads the numbers of MultiSlot text, compiled: two passes over the bytes of whole lines.

A line has for each slot a count and that many numbers, separated by blanks::

    1 0 3 1001 7 -5 2 0.5 1e-3

The first pass counts and finds mistakes, so that the second writes where the numbers belong.
Neither holds Python's lock, and several threads read at once.
"""

import numpy as np

from jaxfleet.tables.compiled import compiled, inlined

# What may be wrong with a line, as the first pass says it.
FINE, NOT_A_COUNT, TOO_FEW, NO_VALUES, NOT_WHOLE, TOO_LARGE, NOT_A_NUMBER, TOO_MANY = range(8)


_NEWLINE, _BLANK, _TAB, _RETURN = 10, 32, 9, 13
_ZERO, _NINE, _MINUS, _PLUS, _DOT = 48, 57, 45, 43, 46
_MOST = np.uint64(1) << np.uint64(63)  # the least value that int64 lacks


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
    """Returns a whole number of 64 bits, with or without a sign, and what is wrong with it.

    Numbers from 2**63 to 2**64 are keys of pslib's (uint64): the int64 of the same bits.
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
    """Returns a number with a point and an exponent, and whether it is one.

    Digits beyond 18 change nothing that a float32 holds. Of `nan` and `inf` there are none.
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
    """Returns how many values a slot has, and what is wrong with that."""
    if stop == at:
        return np.int64(0), TOO_FEW
    number, wrong = _whole(text, at, stop)
    if wrong != FINE or number < 0:
        return number, NOT_A_COUNT
    return number, FINE if number > 0 else NO_VALUES


@inlined
def _value_is(text: np.ndarray, at: int, stop: int, is_real: bool) -> int:
    """Returns what is wrong with a value."""
    if stop == at:
        return TOO_FEW
    if is_real:
        return FINE if _real(text, at, stop)[1] else NOT_A_NUMBER
    wrong: int = _whole(text, at, stop)[1]
    return wrong


@compiled("u8[]", "b1[]", "i32[,]!")
def count(text: np.ndarray, is_real: np.ndarray, counts: np.ndarray) -> tuple[int, int, int, int]:
    """Counts the values of each slot of each line.

    Args:
        text: uint8[n], whole lines.
        is_real: bool[slots], which slots have numbers with points.
        counts: int32[lines, slots], written; empty lines have none of its rows.

    Returns:
        How many lines have values; then the first mistake: what it is (`FINE` for none), the
        number of its line from 0, and its slot.
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
def read(
    text: np.ndarray,
    is_real: np.ndarray,
    counts: np.ndarray,
    places: np.ndarray,
    wholes: np.ndarray,
    reals: np.ndarray,
) -> None:
    """Writes the values of lines in which `count` found no mistake.

    Args:
        text: uint8[n], the same.
        is_real: bool[slots], the same.
        counts: int32[rows, slots], as it wrote them.
        places: int64[slots], where each slot's values begin, in `wholes` or `reals`; changed.
        wholes: int64[m], written.
        reals: float32[k], written.
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
