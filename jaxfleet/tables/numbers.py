"""The numbers of a table's description: which there may be, and what is said of others.

What is wrong with a rate or a probability would show as rows that are not finite, long after and
on another process: so a number is looked at where the user writes it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxfleet.errors import ProgramError

_RULE = "rule"  # in the metadata of a field
_GREATEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Rule:
    """What a number may be.

    Attributes:
        says: the same in words.
        holds: tells whether a number is one of these; `nan` is none of any.
        whole: it is an integer.
    """

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
    """Returns a field of a dataclass whose values follow a rule."""
    return field(default=default, metadata={_RULE: rule})


def rule_of(metadata: Any) -> Rule | None:
    """Returns the rule of a field, by its metadata; None where it is no number."""
    found = metadata.get(_RULE)
    return found if isinstance(found, Rule) else None


def checked(what: str, value: Any, rule: Rule) -> float:
    """Returns a number as Python's own, an `int` where the rule says that it is whole.

    Args:
        what: it is, for an error.
        value: as it was given: Python's, numpy's, or an array of one number.
        rule: what it may be.

    Raises:
        ProgramError: it is none of those.
    """
    kinds = "iu" if rule.whole else "iuf"
    is_number = np.ndim(value) == 0 and np.asarray(value).dtype.kind in kinds
    # numpy has no type for the greatest of Python's integers
    is_number = is_number or (isinstance(value, int) and not isinstance(value, bool))
    if is_number and rule.holds(value):
        return int(value) if rule.whole else float(value)
    raise ProgramError(f"{what} is {value!r}, and must be {rule.says}")
