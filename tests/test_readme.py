"""The README's script prints what the README says, and its picture is the program's own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


SERVERS = (ROOT / "docs" / "parameter-servers.md").read_text(encoding="utf-8")
PAGES = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("tables.md", "memory.md")]
MOST_LINES = 200  # a stranger's first page


def fenced(marker: str, page: str = README) -> str:
    """Returns the fenced block under a marker."""
    match = re.search(rf"<!-- {marker} -->\s*```\w*\n(.*?)```", page, re.DOTALL)
    assert match is not None, f"the page has no block marked '{marker}'"
    return match[1]


def test_the_readme_is_short_and_begins_with_its_commands() -> None:
    assert len(README.splitlines()) <= MOST_LINES
    assert re.findall(r"```(\w+)", README)[:3] == ["bash", "bash", "python"]


def test_every_python_block_is_marked_and_so_run() -> None:
    assert README.count("```python") == len(re.findall(r"<!-- (script|runs: \w+) -->", README))


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Runs the script in a process of its own, and then prints what grad_allreduce did."""
    folder = tmp_path_factory.mktemp("readme")
    script = folder / "script.py"
    more = '\nprint("----")\nprint(step.dumps["grad_allreduce"].diff)\nprint("----")\n'
    for page in (README, *PAGES):
        blocks = re.findall(r"<!-- runs: \w+ -->\s*```python\n(.*?)```", page, re.DOTALL)
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
def test_the_picture_is_the_program(printed: list[str]) -> None:
    shown = fenced("picture").strip().splitlines()
    assert len(shown) > 10  # a picture, not a stub
    assert printed[1].strip().splitlines()[: len(shown)] == shown


@pytest.mark.processes
def test_all_blocks_run_as_pasted_behind_the_script(printed: list[str]) -> None:
    assert "off from one device by at most" in printed[2]
    assert "memory of 'deep_step'" in printed[2]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Prints, in a process of its own, the programs of the script's trainers and servers."""
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
def test_the_trainers_picture_is_the_end_of_its_program(programs: list[str]) -> None:
    shown = fenced("trainer").strip("\n")
    assert "send(" in shown
    assert programs[0].strip("\n").endswith(shown)


@pytest.mark.processes
def test_the_servers_picture_is_its_whole_program(programs: list[str]) -> None:
    assert programs[1].strip() == fenced("server", SERVERS).strip()


@pytest.mark.processes
def test_verify_says_that_trainers_agree_with_one_device(programs: list[str]) -> None:
    assert "the same state on all trainers" in programs[2]
