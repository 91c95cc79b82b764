"""The examples in jaxfleet's docstrings.

pytest's `--doctest-modules` searches every object of 1,600 modules, 6 s in each worker, although
few modules have examples.
"""

import doctest
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_EXAMPLE = re.compile(r"^\s*>>> ", re.MULTILINE)


def modules_with_examples() -> list[str]:
    """Returns the names of the modules of jaxfleet whose text contains an example."""
    folders = {"jaxfleet": "jaxfleet", "passes": "jaxfleet.passes"}  # `**` follows no link
    return [
        ".".join((package, *path.relative_to(ROOT / folder).with_suffix("").parts))
        for folder, package in folders.items()
        for path in sorted((ROOT / folder).glob("**/*.py"))
        if _EXAMPLE.search(path.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_a_module_give_what_they_show(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted
    assert not result.failed
