"""The examples in jaxfleet's docstrings.

pytest's `--doctest-modules` searches every object of 1,600 modules, 6 s in each worker, although
few modules have examples.
"""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

import jaxfleet

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


def test_every_class_and_function_of_the_package_has_an_example() -> None:
    values = {name: getattr(jaxfleet, name) for name in dir(jaxfleet) if not name.startswith("_")}
    named = {
        name: inspect.getdoc(value) or ""
        for name, value in values.items()
        if inspect.isclass(value) or inspect.isroutine(value)
    }
    assert "distribute" in named
    assert [name for name, text in named.items() if not _EXAMPLE.search(text)] == []
