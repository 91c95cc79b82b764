"""Every Python block of the documentation runs as pasted, in the order of its page."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import LANGUAGES, ROOT, blocks_of, is_run, pages
from tests.docs.run_pages import TIMEOUT_S

# Pages that take more than 5 s: they start processes.
SLOW = frozenset[str]()
# Pages with blocks that are still fragments.
NOT_YET = frozenset(
    {
        "docs/fluid.md",
    }
)
ALL = [block for page in pages() for block in blocks_of(page)]
# tests/docs/test_tutorials.py follows these, which make files and start jobs.
FOLLOWED = ("docs/tutorials/", "docs/migrating/")
RUN = sorted({b.page for b in ALL if is_run(b) and not b.page.startswith(FOLLOWED)} - NOT_YET)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Runs, in one process that has imported JAX once, the pages of the tests that were chosen."""
    chosen = [
        str(item.callspec.params["page"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and "results" in item.fixturenames
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.run_pages", "--json", *chosen],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("JAXFLEET_")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S * len(chosen),
        check=True,
    )
    return {result["page"]: result for result in json.loads(done.stdout)}


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.grid) if p in SLOW else p for p in RUN]
)
def test_the_blocks_of_a_page_run_in_their_order(
    page: str, results: dict[str, dict[str, Any]]
) -> None:
    assert results[page]["failure"] == ""


def test_every_page_that_is_left_out_has_blocks_to_run() -> None:
    assert {block.page for block in ALL if is_run(block)} >= NOT_YET | SLOW


def test_every_block_has_a_language_that_says_how_it_is_checked() -> None:
    assert [b.place for b in ALL if b.language not in LANGUAGES] == []


def test_every_file_of_a_page_is_used_by_a_later_block() -> None:
    for page in pages():
        blocks = blocks_of(page)
        for at, block in enumerate(blocks):
            if (name := block.marked("file")) and not page.startswith(FOLLOWED):
                used = re.compile(rf"\b{re.escape(Path(name).stem)}\b")
                assert any(used.search(later.text) for later in blocks[at + 1 :]), block.place
