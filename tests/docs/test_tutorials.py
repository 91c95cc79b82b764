"""The tutorials and the migration pages, executed in an empty folder as a reader would.

A page marks what it gives: `<!-- file: NAME -->` before a file to save, `<!-- run -->` before
commands, and `<!-- prints -->` before lines that the commands above it print, in this order.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*(DOCS / "tutorials").glob("*.md"), *(DOCS / "migrating").glob("*.md")])
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^>]+) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)```", re.DOTALL
)
SHELL = 'python() { "$PYTHON" "$@"; }; jaxfleet() { "$PYTHON" -m jaxfleet "$@"; }; set -e\n'
NUMBER = re.compile(r"\d+\.\d+")
LONGEST_S = 300  # a job of four processes takes 15 s; more on a busy machine
CLOSE = 0.02  # figures after hundreds of steps in float32, summed in another order


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, with the comment before it."""

    mark: str
    language: str
    text: str


def blocks_of(page: Path) -> Iterator[Block]:
    for found in BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield Block(found["mark"] or "", found["language"], found["text"])


def run(commands: str, folder: Path) -> str:
    """Runs commands in a folder, without the tests' own settings, and returns what they print."""
    clean = {name: value for name, value in os.environ.items() if "JAXFLEET" not in name}
    done = subprocess.run(
        ["/bin/bash", "-c", SHELL + commands],
        cwd=folder,
        env={**clean, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def says(line: str, shown: str) -> bool:
    """Whether a printed line begins as a shown one (`...` ends it), with about its numbers."""
    shown = shown.removesuffix("...")
    if not NUMBER.sub("#", line.strip()).startswith(NUMBER.sub("#", shown.strip())):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(line), strict=False)
    return all(float(b) == pytest.approx(float(a), rel=CLOSE) for a, b in pairs)


def missing_lines(printed: str, shown: str, *, in_order: bool = True) -> list[str]:
    """Returns the shown lines that were not printed, or not behind the one before."""
    left, missing = printed.splitlines(), []
    for wanted in shown.splitlines():
        at = next((i for i, line in enumerate(left) if says(line, wanted)), None)
        if at is None:
            missing.append(wanted)
        elif in_order:
            left = left[at + 1 :]
    return missing


def follow(page: Path, folder: Path) -> int:
    """Does what a page says, and returns how many commands it ran."""
    printed, ran = "", 0
    for block in blocks_of(page):
        if block.mark.startswith("file: "):
            (folder / block.mark.removeprefix("file: ")).write_text(block.text, encoding="utf-8")
        elif block.mark == "run":
            printed, ran = run(block.text, folder), ran + 1
        elif block.mark.startswith("prints"):
            in_order = "unordered" not in block.mark
            missing = missing_lines(printed, block.text, in_order=in_order)
            assert missing == [], printed
    return ran


def test_there_are_pages() -> None:
    assert len(PAGES) == 9


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_page_is_run_or_is_another_system(page: Path) -> None:
    for block in blocks_of(page):
        is_install = block.language == "bash" and "pip install" in block.text
        kind = block.mark.split(":")[0]
        is_theirs = block.language == "console"  # a command of another system
        is_checked = kind in {"file", "run", "prints", "prints unordered"}
        assert is_install or is_theirs or is_checked, block
        if block.language == "python":
            ast.parse(block.text)
        assert [line for line in block.text.splitlines() if len(line) > 120] == []


@pytest.mark.grid
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_can_be_followed(page: Path, tmp_path: Path) -> None:
    assert follow(page, tmp_path) > 0


def test_a_line_that_is_not_printed_is_found_out() -> None:
    assert missing_lines("a\nloss 0.5001 of 3\nb", "loss 0.5000") == []
    assert missing_lines("a\nloss 0.6001 of 3\nb", "loss 0.5000") == ["loss 0.5000"]
    assert missing_lines("b\na", "a\nb") == ["b"]
    assert missing_lines("b\na", "a\nb", in_order=False) == []
