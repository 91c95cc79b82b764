"""The tutorials and the migration pages consist of files and commands that the grid executes."""

import ast

import pytest

from tests.docs.blocks import FOLLOWED, blocks_of, pages
from tests.docs.printed_lines import missing_lines

PAGES = [page for page in pages() if page.startswith(FOLLOWED)]


def test_there_are_pages() -> None:
    assert len(PAGES) == 9


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_is_run_or_is_another_system(page: str) -> None:
    for block in blocks_of(page):
        is_install = block.language == "bash" and "pip install" in block.text
        is_theirs = block.language == "console"  # a command of another system
        is_checked = block.marker.split(":")[0] in {"file", "run", "prints", "prints unordered"}
        assert is_install or is_theirs or is_checked, block.place
        if block.language == "python":
            ast.parse(block.text)


def test_a_line_that_is_not_printed_is_found_out() -> None:
    assert missing_lines("a\nloss 0.5001 of 3\nb", "loss 0.5000") == []
    assert missing_lines("a\nloss 0.6001 of 3\nb", "loss 0.5000") == ["loss 0.5000"]
    assert missing_lines("b\na", "a\nb") == ["b"]
    assert missing_lines("b\na", "a\nb", in_order=False) == []
