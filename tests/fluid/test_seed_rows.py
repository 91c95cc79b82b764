"""`seed_rows.md` names a test for every row of the documents."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("seed_rows.md")
_ROW = re.compile(r"^\| (\d{3})\.(\d+) \| (.+?) \| (.*) \| (.*) \|$", re.MULTILINE)
_COUNTS = {"000": 40, "001": 84, "002": 33, "003": 13, "004": 49}


def rows() -> list[tuple[str, int, tuple[str, ...]]]:
    """Returns the document, the number and the tests of each row."""
    found = _ROW.findall(PAGE.read_text(encoding="utf-8"))
    return [(doc, int(at), tuple(re.findall(r"`([^`]+)`", by))) for doc, at, _, by, _ in found]


def exists(test: str) -> bool:
    """Whether `file::name` is a test function of this suite."""
    file, _, name = test.partition("::")
    path = TESTS / file
    return path.is_file() and f"\ndef {name}(" in path.read_text(encoding="utf-8")


def test_every_row_of_the_documents_names_tests_that_exist() -> None:
    missing = [(doc, at, t) for doc, at, tests in rows() for t in tests if not exists(t)]
    assert not missing, "seed_rows.md names tests that were renamed or removed"
    assert not [(doc, at) for doc, at, tests in rows() if not tests]


@pytest.mark.parametrize("document", sorted(_COUNTS))
def test_the_page_has_every_row_of_a_document_once(document: str) -> None:
    numbers = [at for doc, at, _ in rows() if doc == document]
    assert numbers == list(range(1, _COUNTS[document] + 1))


def test_the_example_of_every_document_that_has_some_is_kept_word_for_word() -> None:
    kept = {path.name[:3] for path in PAGE.with_name("documents").glob("*.txt")}
    assert kept == {"002", "003", "004"}  # 000 has those of 003, and 001 has none
