"""The parts of a table spec, and range checks of their numbers.

A wrong rate or probability would show up as non-finite rows, much later and in another process, so
numbers are checked where the user writes them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np

from jaxfleet.errors import ProgramError

_RULE = "rule"  # key in a field's metadata
_GREATEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Rule:
    """Range of a number, in words and as a function; `nan` never holds."""

    says: str
    holds: Callable[[Any], bool]
    whole: bool = False


def _rounded(x: float) -> float:
    return float(np.float32(x))


FINITE = Rule("a finite float32", lambda x: abs(x) <= _GREATEST)
NOT_NEGATIVE = Rule("a number from 0 on", lambda x: 0 <= x <= _GREATEST)
POSITIVE = Rule("a number above 0", lambda x: abs(x) <= _GREATEST and _rounded(x) > 0)
PART = Rule("a number from 0 to 1", lambda x: 0 <= x <= 1)
BELOW_ONE = Rule("a number from 0 to below 1", lambda x: 0 <= x < 1 and _rounded(x) < 1)
STEPS = Rule("a number of steps, from 0 on", lambda x: x >= 0, whole=True)
COUNT = Rule("an integer from 1 to 2**31 - 1", lambda x: 1 <= x < 2**31, whole=True)
SOME = Rule("an integer from 1 on", lambda x: x >= 1, whole=True)
SEED = Rule("an int64", lambda x: -(2**63) <= x < 2**63, whole=True)


def number(default: float, rule: Rule = FINITE) -> Any:
    """Returns a dataclass field whose values follow a rule."""
    return field(default=default, metadata={_RULE: rule})


def rule_of(metadata: Any) -> Rule | None:
    """Returns the rule in a field's metadata; None for a field that is not a number."""
    found = metadata.get(_RULE)
    return found if isinstance(found, Rule) else None


def checked(what: str, value: Any, rule: Rule) -> float:
    """Returns a number, named `what`, as Python's own: an `int` if the rule asks for integers.

    The value is Python's, numpy's, or an array of one number.

    Raises:
        ProgramError: the value is out of range or not a number.
    """
    kinds = "iu" if rule.whole else "iuf"
    is_number = np.ndim(value) == 0 and np.asarray(value).dtype.kind in kinds
    # numpy has no type for the largest of Python's integers
    is_number = is_number or (isinstance(value, int) and not isinstance(value, bool))
    if is_number and rule.holds(value):
        return int(value) if rule.whole else float(value)
    raise ProgramError(f"{what} is {value!r}, and must be {rule.says}")


@dataclass(frozen=True)
class Part:
    """A variant part of a table spec, discriminated by `kind`.

    Raises:
        ProgramError: a number is out of range.
    """

    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for each in fields(self):
            if (rule := rule_of(each.metadata)) is not None:
                what = f"{type(self).__name__}: {each.name}"
                object.__setattr__(self, each.name, checked(what, getattr(self, each.name), rule))
