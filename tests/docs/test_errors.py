"""docs/errors.md quotes messages that the source still contains."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
HOLE = "\0"  # stands for a value in an f-string, and for the rest of a sum of strings
LEAST_TEXT = 6  # constant characters, under which a message would match anything


def quoted_messages() -> list[str]:
    """Returns the heads of the list's items: messages in backquotes, with `...` for values."""
    return re.findall(r"^- `([^`]+)`:$", PAGE, re.MULTILINE)


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Yields every string of a module, with a hole instead of each value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def is_made_of(message: str, text: str) -> bool:
    """Whether a text has the constant parts of a message, in order."""
    at = 0
    for part in filter(None, map(str.strip, message.split("..."))):
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


@pytest.fixture(scope="module")
def texts() -> list[str]:
    files = [*(ROOT / "jaxfleet").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]
    return [text for file in files for text in texts_of(ast.parse(file.read_text("utf-8")))]


def test_every_quoted_message_is_in_the_source(texts: list[str]) -> None:
    quoted = quoted_messages()
    assert len(quoted) > 80
    assert [m for m in quoted if not any(is_made_of(m, text) for text in texts)] == []


def test_every_quoted_message_has_enough_text_to_be_found() -> None:
    short = [m for m in quoted_messages() if len(re.sub(r"\W", "", m)) < LEAST_TEXT]
    assert short == []


def test_a_message_that_is_gone_is_found_out(texts: list[str]) -> None:
    message = "the ... was used before: the last step took its memory"
    assert any(is_made_of(message, text) for text in texts)
    assert not any(is_made_of(message.replace("memory", "place"), text) for text in texts)


def test_a_value_does_not_stand_for_words() -> None:
    assert is_made_of("'...' is lost at ...", f"'{HOLE}' is lost at {HOLE} today")
    assert not is_made_of("it is lost at noon", f"it is lost at {HOLE}")
