"""Choice of test parameters that run by default, and of those that run only with `-m grid`."""

from collections.abc import Iterable
from typing import Any

import pytest


def by_default(values: Iterable[Any], *default: Any) -> list[Any]:
    """Returns all values as parameters; those that are not default ones are marked `grid`."""
    return [value if value in default else grid(value) for value in values]


def grid(*values: Any) -> Any:
    """Returns a parameter that only the grid runs."""
    return pytest.param(*values, marks=pytest.mark.grid)
