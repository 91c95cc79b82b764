"""`peer_cases.md` names the tests that cover each case of fluid's own, or the reason for none."""

import re
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("peer_cases.md")
_LINE = re.compile(r"^\| (\d+) \| (.*) \| (.*) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """A line of the page.

    Attributes:
        number: of the case.
        shown_by: the tests, as `file::name`.
        why_not: the reason for no tests, or the uncovered part of the case.
    """

    number: int
    shown_by: tuple[str, ...]
    why_not: str


def read_page() -> list[Case]:
    found = _LINE.findall(PAGE.read_text(encoding="utf-8"))
    return [Case(int(n), tuple(re.findall(r"`([^`]+)`", by)), why) for n, by, why in found]


def exists(test: str) -> bool:
    """Whether `file::name` is a test function of this suite."""
    file, _, name = test.partition("::")
    path = TESTS / file
    return path.is_file() and f"\ndef {name}(" in path.read_text(encoding="utf-8")


def test_every_test_on_the_page_exists() -> None:
    missing = [test for case in read_page() for test in case.shown_by if not exists(test)]
    assert not missing, "peer_cases.md names tests that were renamed or removed"


def test_a_case_without_a_test_has_a_reason() -> None:
    silent = [case.number for case in read_page() if not case.shown_by and not case.why_not]
    assert not silent


def test_the_page_has_every_case_once() -> None:
    numbers = [case.number for case in read_page()]
    assert numbers == sorted(set(numbers))
    assert (numbers[0], numbers[-1], len(numbers)) == (1, 193, 155)
