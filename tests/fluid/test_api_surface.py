"""Every name of fluid exists as scripts call it, or `docs/fluid-differences.md` explains it."""

import re
from pathlib import Path

import pytest

from tests.fluid.surface import Row, rows

PART = 6  # of the plan: complete
BEGUN = 6  # fleet: partly complete
PAGE = Path(__file__).parents[2] / "docs" / "fluid-differences.md"


def listed() -> set[str]:
    table = PAGE.read_text(encoding="utf-8").partition("| --- |")[2].partition("\n\n")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE))


def test_what_differs_is_what_the_page_lists() -> None:
    found = {row.path: row.difference() for row in rows() if row.part <= PART}
    differing = {name: how for name, how in found.items() if how}
    assert set(differing) == listed(), differing


def test_what_later_parts_bring_is_not_there_yet() -> None:
    there = [row.path for row in rows() if row.part > BEGUN and not row.difference()]
    assert not there, "say in api_surface.md that this part brings it"


def test_no_name_stands_twice() -> None:
    names = [row.text.partition("(")[0] for row in rows()]
    assert len(names) == len(set(names))
    assert len(names) > 300  # the table was parsed


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("Program.clone(for_test=True)", "has for_test=False"),
        ("Program.clone(test=False)", "takes for_test where test stands"),
        ("Program.clone(for_test=False, more=1)", "does not take more"),
        ("Program.clone()", ""),
        ("program_guard(main_program)", ""),
        ("program_guard()", "demands main_program"),
        ("Program.random_seed = 1", "is 0"),
        ("Program.nothing", "is missing"),
        ("op:nothing", "is missing"),
    ],
)
def test_a_difference_is_found(text: str, how: str) -> None:
    assert Row(text, re.split(r"[( ]", text)[0], PART).difference() == how
