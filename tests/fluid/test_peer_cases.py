"""Every case of the catalogue has a test named by its number, or a line that says why it has none.

`peer_cases.md` lists both; `python -m tests.fluid.test_peer_cases` writes its tests anew. A test
named `test_c22_c23_...` shows two cases, one named `test_c3_to_c14_...` those from one to the
other.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("peer_cases.md")
_LINE = re.compile(r"^\| (\d+) \| (.*) \| (.*) \|$", re.MULTILINE)
_TEST = re.compile(r"^def (test_((?:c\d+_(?:to_)?)+)\w*)", re.MULTILINE)


@dataclass(frozen=True)
class Case:
    """A line of the page.

    Attributes:
        number: of the case.
        shown_by: the tests, as `file::name`.
        why_not: why there are none, or what of the case they do not show.
    """

    number: int
    shown_by: tuple[str, ...]
    why_not: str

    def __str__(self) -> str:
        tests = ", ".join(f"`{test}`" for test in self.shown_by)
        return f"| {self.number} | {tests or '-'} | {self.why_not} |"


def read_page() -> list[Case]:
    """Returns the lines of the page."""
    found = _LINE.findall(PAGE.read_text(encoding="utf-8"))
    return [Case(int(n), tuple(re.findall(r"`([^`]+)`", by)), why) for n, by, why in found]


def numbered_tests(numbers: list[int]) -> Iterator[tuple[int, str]]:
    """Yields the number of a case and a test that is named by it."""
    for path in sorted(TESTS.glob("**/test_*.py")):
        for name, prefix in _TEST.findall(path.read_text(encoding="utf-8")):
            first, *rest = map(int, re.findall(r"\d+", prefix))
            shown = [first, *rest]
            if "to_" in prefix:
                shown = [n for n in numbers if first <= n <= rest[-1]]
            yield from ((n, f"{path.relative_to(TESTS)}::{name}") for n in shown)


def found_anew() -> list[Case]:
    """Returns the lines of the page with the tests that there are."""
    listed = read_page()
    tests: dict[int, list[str]] = {case.number: [] for case in listed}
    for number, test in numbered_tests(list(tests)):
        tests[number].append(test)  # a KeyError: the catalogue has no such case
    return [Case(case.number, tuple(tests[case.number]), case.why_not) for case in listed]


def test_the_page_lists_the_tests_that_there_are() -> None:
    assert read_page() == found_anew(), "python -m tests.fluid.test_peer_cases writes it anew"


def test_a_case_is_shown_or_it_is_said_why_not() -> None:
    silent = [case.number for case in read_page() if not case.shown_by and not case.why_not]
    assert not silent


def test_the_page_has_every_case_once() -> None:
    numbers = [case.number for case in read_page()]
    assert numbers == sorted(set(numbers))
    assert (numbers[0], numbers[-1], len(numbers)) == (1, 193, 155)


if __name__ == "__main__":
    anew = {str(case.number): str(case) for case in found_anew()}
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(_LINE.sub(lambda line: anew[line[1]], text), encoding="utf-8")
