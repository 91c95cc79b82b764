"""The README's script prints the README's output; its picture, figures and links are current."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_LINES = 170  # a newcomer's first page
MOST_COLUMNS = 120


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


IR = page("ir.md")
SERVERS = page("parameter-servers.md")
COMPARISON = page("comparison.md")
PAGES = [page("tables.md"), page("memory.md")]


def fenced(marker: str, text: str = README) -> str:
    match = re.search(rf"<!-- {marker} -->\s*```\w*\n(.*?)```", text, re.DOTALL)
    assert match is not None, f"the page has no block marked '{marker}'"
    return match[1]


def test_the_readme_is_short_and_begins_with_its_commands() -> None:
    assert len(README.splitlines()) <= MOST_LINES
    assert [line for line in README.splitlines() if len(line) > MOST_COLUMNS] == []
    assert re.findall(r"```(\w+)", README)[:3] == ["bash", "bash", "python"]


def test_every_python_block_is_marked_and_so_run() -> None:
    assert README.count("```python") == len(re.findall(r"<!-- (script|runs: \w+) -->", README))


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


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Runs the script in its own process, and then prints the effect of grad_allreduce."""
    folder = tmp_path_factory.mktemp("readme")
    script = folder / "script.py"
    more = '\nprint("----")\nprint(step.dumps["grad_allreduce"].diff)\nprint("----")\n'
    for text in (README, *PAGES):
        blocks = re.findall(r"<!-- runs: \w+ -->\s*```python\n(.*?)```", text, re.DOTALL)
        assert blocks
        more += "".join(blocks)
    script.write_text(fenced("script") + more, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,  # it takes about 10 s; more on a busy machine
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("----\n")


@pytest.mark.processes
def test_the_script_prints_what_the_readme_says(printed: list[str]) -> None:
    without_seconds = re.compile(r"; [\d.]+ s$", re.MULTILINE)
    found = without_seconds.sub("", printed[0]).strip()
    assert found == without_seconds.sub("", fenced("output")).strip()


@pytest.mark.processes
def test_the_diff_is_that_of_the_program(printed: list[str]) -> None:
    shown = fenced("picture", IR).strip().splitlines()
    assert len(shown) > 10  # more than a stub
    assert printed[1].strip().splitlines()[: len(shown)] == shown


@pytest.mark.processes
def test_all_blocks_run_as_pasted_behind_the_script(printed: list[str]) -> None:
    assert "off from one device by at most" in printed[2]
    assert "memory of 'deep_step'" in printed[2]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Prints, in its own process, the programs of the script's trainers and servers."""
    folder = tmp_path_factory.mktemp("programs")
    head = fenced("script").split("step = jf.distribute")[0]
    more = """
made = jf.Twin(train_step, (state, batch), servers=2, trainers=2).programs()
print(made.trainer, made.servers[0], sep="\\n----\\n")
print("----")
print(jf.verify(train_step, state, [batch] * 20, servers=2, trainers=2))
"""
    script = folder / "script.py"
    script.write_text(head + more, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=250,  # it takes about 10 s; more on a busy machine
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("----\n")


@pytest.mark.processes
def test_the_trainers_listing_is_the_end_of_its_program(programs: list[str]) -> None:
    shown = fenced("trainer", SERVERS).strip("\n")
    assert "send(" in shown
    assert programs[0].strip("\n").endswith(shown)


@pytest.mark.processes
def test_the_servers_listing_is_its_whole_program(programs: list[str]) -> None:
    assert programs[1].strip() == fenced("server", SERVERS).strip()


@pytest.mark.processes
def test_verify_says_that_trainers_agree_with_one_device(programs: list[str]) -> None:
    assert "the same state on all trainers" in programs[2]
