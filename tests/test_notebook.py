"""The parts of notebook representations: text is escaped, and tables are cut short."""

import pytest

from jaxfleet.notebook import MOST_ROWS, cut_table, element, folded, head, joined, shown, table
from tests.markup import text_of

HOSTILE = ("<script>alert(1)</script>", "\"'><img src=x onerror=y>", "&lt;b&gt;", "日本 é", "]]>")


@pytest.mark.parametrize("text", HOSTILE)
def test_text_is_shown_as_it_is(text: str) -> None:
    parts = head("Step", text, text), table([(text, text)]), folded(text, text)
    assert text_of(shown(*parts)).count(text) == 6
    assert text_of(element("div", "x", title=text)) == "x"


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("a\x00b", r"a\x00b"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\u202eb", r"a\u202eb"),
        ("\ud800", r"\ud800"),
    ],
)
def test_marks_that_hide_or_turn_text_are_spelled_out(text: str, spelled: str) -> None:
    assert text_of(shown(element("div", text))) == spelled


def test_only_markup_is_not_escaped() -> None:
    assert joined("<b>", element("b", "<i>")) == "&lt;b&gt;<b>&lt;i&gt;</b>"


def test_a_long_table_is_cut_short_and_says_so() -> None:
    made = cut_table([(str(row), "x") for row in range(MOST_ROWS + 1_200)], heads=("row", "value"))
    assert "1,200 more rows: print it to read all" in text_of(made)
    assert made.count("<tr>") == MOST_ROWS + 1
    assert "more rows" not in cut_table([("1", "x")], heads=("row", "value"))
