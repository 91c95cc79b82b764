"""Texts of other processes are made safe for terminals and pages."""

import pytest

from jaxfleet.observability import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [("损失 ü", "损失 ü"), ("\x1b[2J", "?[2J"), ("\ud800\u202e", "??"), ("x" * 9, "xxxxx...")],
)
def test_a_terminal_and_utf8_take_the_text(text: str, shown: str) -> None:
    assert printable(text, 8) == shown
