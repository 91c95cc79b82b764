"""Compares the lines that a command prints among others with those that a page shows."""

import re

import pytest

NUMBER = re.compile(r"\d+\.\d+")
CLOSE = 0.02  # figures after hundreds of steps in float32, summed in another order


def is_shown(line: str, shown: str) -> bool:
    """Whether a printed line begins as a shown one (`...` ends it), with about its numbers."""
    shown = shown.removesuffix("...")
    if not NUMBER.sub("#", line.strip()).startswith(NUMBER.sub("#", shown.strip())):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(line), strict=False)
    return all(float(b) == pytest.approx(float(a), rel=CLOSE) for a, b in pairs)


def missing_lines(printed: str, shown: str, *, in_order: bool = True) -> list[str]:
    """Returns the shown lines that were not printed, or not behind the one before."""
    left, missing = printed.splitlines(), []
    for wanted in shown.splitlines():
        at = next((i for i, line in enumerate(left) if is_shown(line, wanted)), None)
        if at is None:
            missing.append(wanted)
        elif in_order:
            left = left[at + 1 :]
    return missing
