"""The README is short, and its picture, figures and comparison are current.

tests/docs runs its blocks.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_LINES = 170  # a newcomer's first page
MOST_COLUMNS = 120


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


COMPARISON = page("comparison.md")


def test_the_readme_is_short_and_begins_with_its_commands() -> None:
    assert len(README.splitlines()) <= MOST_LINES
    assert [line for line in README.splitlines() if len(line) > MOST_COLUMNS] == []
    assert re.findall(r"```(\w+)", README)[:3] == ["bash", "bash", "python"]


def test_the_picture_is_what_its_script_draws_without_any_package() -> None:
    script = ROOT / "docs" / "draw_overview.py"
    drawn = subprocess.run(
        [sys.executable, "-I", "-S", str(script)], capture_output=True, check=True, timeout=30
    )
    assert (ROOT / "docs" / "overview.svg").read_bytes() == drawn.stdout
    assert "](docs/overview.svg)" in README


def test_every_measured_figure_is_one_of_the_benchmarks() -> None:
    match = re.search(r"<!-- measured -->(.*?)<!-- /measured -->", README, re.DOTALL)
    assert match is not None
    figures = re.findall(r"\d+\.\d+", match[1])
    assert len(figures) > 5
    found = re.findall(r"\d+\.\d+", page("benchmarks.md"))
    assert [figure for figure in figures if figure not in found] == []


def test_every_row_of_the_comparison_is_a_section_of_its_page() -> None:
    table = README.split("## Compared with other systems")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\w[^|]*) \|", table, re.MULTILINE)
    assert rows == re.findall(r"^## (.*)$", COMPARISON, re.MULTILINE)


def test_every_compared_fact_has_one_source() -> None:
    sources = dict(re.findall(r"^\[([\w-]+)\]: (https://\S+)$", COMPARISON, re.MULTILINE))
    facts = re.findall(r"^\| (?!---|system)(.+) \| (.+) \| (.+) \|$", COMPARISON, re.MULTILINE)
    assert len(facts) > 40
    used = set()
    for system, fact, source in facts:
        by_name = re.fullmatch(r"\[[^\]]+\]\[([\w-]+)\]", source)
        own_page = re.fullmatch(r"\[[^\]]+\]\([\w-]+\.md(#[\w-]+)?\)", source)
        assert own_page if system == "jaxfleet" else by_name, fact
        if by_name:
            assert by_name[1] in sources, fact
            used.add(by_name[1])
    assert used == set(sources)
