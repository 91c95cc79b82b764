"""Every Python block of the documentation runs as pasted, in the order of its page."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import FOLLOWED, LANGUAGES, ROOT, blocks_of, is_run, pages
from tests.docs.run_pages import GRID_TIMEOUT_S

MOST_COLUMNS = 120
ALL = [block for page in pages() for block in blocks_of(page)]
DEFAULT = sorted({b.page for b in ALL if is_run(b) and not b.page.startswith(FOLLOWED)})
GRID = sorted({b.page for b in ALL if b.page.startswith(FOLLOWED) or b.marked("run") == "grid"})


def run_pages(request: pytest.FixtureRequest, fixture: str, *options: str) -> dict[str, str]:
    """Runs the pages of the chosen tests in one process that has imported JAX once."""
    chosen = [
        str(item.callspec.params["page"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and fixture in item.fixturenames
    ]
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.run_pages", "--json", *options, *chosen],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("JAXFLEET_")},
        capture_output=True,
        text=True,
        timeout=GRID_TIMEOUT_S * len(chosen),
        check=True,
    )
    return {result["page"]: result["failure"] for result in json.loads(done.stdout)}


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> dict[str, str]:
    return run_pages(request, "failures")


@pytest.fixture(scope="module")
def grid_failures(request: pytest.FixtureRequest) -> dict[str, str]:
    return run_pages(request, "grid_failures", "--grid")


@pytest.mark.grid
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", DEFAULT)
def test_the_blocks_of_a_page_run_in_their_order(page: str, failures: dict[str, str]) -> None:
    assert failures[page] == ""


@pytest.mark.grid
@pytest.mark.processes
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", GRID)
def test_a_page_with_long_commands_runs(page: str, grid_failures: dict[str, str]) -> None:
    assert grid_failures[page] == ""


def test_no_line_is_longer_than_120_columns_outside_tables_and_listings() -> None:
    long = []
    for page in pages():
        shown = {
            block.line + number
            for block in blocks_of(page)
            if block.language in {"text", "diff", "console"}
            for number in range(len(block.text.splitlines()))
        }
        for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
            if len(line) > MOST_COLUMNS and number not in shown and not line.startswith("|"):
                long.append(f"{page}:{number}")
    assert long == []


def test_every_marker_is_one_that_the_runner_reads() -> None:
    known = re.compile(
        r"|file: \S+|output|prints|prints unordered|raises: \w+|run|run: grid|command: \w+"
    )
    assert [f"{b.place}: {b.marker}" for b in ALL if not known.fullmatch(b.marker)] == []


def test_every_block_has_a_language_that_says_how_it_is_checked() -> None:
    assert [b.place for b in ALL if b.language not in LANGUAGES] == []


def test_every_file_of_a_page_is_used_by_a_later_block() -> None:
    for page in pages():
        blocks = blocks_of(page)
        for at, block in enumerate(blocks):
            if (name := block.marked("file")) and not page.startswith(FOLLOWED):
                used = re.compile(rf"\b{re.escape(Path(name).stem)}\b")
                assert any(used.search(later.text) for later in blocks[at + 1 :]), block.place
