"""Finds the programs in a pass's docstring, so that a test can run them."""

import re
from inspect import cleandoc

from jaxfleet.pipeline import Pass

_EXAMPLE = re.compile(r"^Before::\n(.*?)^After::\n(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)


def docstring_programs(cls: type[Pass]) -> list[tuple[str, str]]:
    """Returns the (before, after) texts in a pass's docstring, in order."""
    return _EXAMPLE.findall(cleandoc(cls.__doc__ or ""))
