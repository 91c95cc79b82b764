"""The programs in every pass's docstring are the pass's input and output."""

from pathlib import Path

import pytest

import jaxfleet.passes
from jaxfleet.pipeline import Pass, registered_passes
from jaxfleet.testing import check_pass, docstring_programs

SHIPPED = f"{jaxfleet.passes.__name__}."
PASSES = [cls for cls in registered_passes().values() if cls.__module__.startswith(SHIPPED)]


@pytest.mark.parametrize("cls", PASSES, ids=lambda cls: cls.name)
def test_the_docstring_shows_what_the_pass_does(cls: type[Pass]) -> None:
    examples = docstring_programs(cls)
    assert examples, f"{cls.name}: no Before:: and After:: in the docstring"
    for before, after in examples:
        check_pass(cls(), before=before, after=after)


def test_the_page_of_passes_lists_each() -> None:
    page = Path("docs/passes.md").read_text(encoding="utf-8")
    assert [cls.name for cls in PASSES if f"`{cls.name}`" not in page] == []
