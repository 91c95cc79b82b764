"""Commands and options of the documentation are those of the parsers, and the other way round."""

import argparse
import importlib.util
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator

import pytest

from jaxfleet.cli.app import COMMANDS, make_parser
from tests.docs.blocks import ROOT, Block, blocks_of, pages

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = set(PROJECT["optional-dependencies"])


def commands_of(block: Block) -> Iterator[list[str]]:
    """Returns the words of every simple command; in a console, of the lines behind `$`."""
    text = block.text.replace("\\\n", " ")
    if block.language == "console":
        text = "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in {";", "&&", "||", "|", "&"}:
                while words and re.match(r"[A-Z_]+=", words[0]):
                    del words[0]
                if words:
                    yield words
                words = []
            else:
                words.append(word)


GIVEN = [
    pytest.param(block, words, id=f"{block.place}-{words[0]}")
    for page in pages()
    for block in blocks_of(page)
    if block.language in {"bash", "console"}
    for words in commands_of(block)
]


@pytest.mark.parametrize(("block", "words"), GIVEN)
def test_a_command_of_a_page_is_one_that_exists(block: Block, words: list[str]) -> None:
    if words[0] == "mpirun":
        words = words[words.index("python") :]
    match words:
        case ["jaxfleet", *given]:
            arguments = [*itertools.takewhile(lambda word: word not in {">", ">>", "<"}, given)]
            make_parser(arguments).parse_args(arguments)
        case ["pip", *given] | ["python", "-m", "pip", *given]:
            assert given[0] == "install"
            named = re.findall(r"\[([\w,]+)\]", " ".join(given))
            assert {extra for names in named for extra in names.split(",")} <= EXTRAS
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module) is not None or module == "mkdocs", module
        case ["python", script, *_] if script.endswith(".py"):
            files = {other.marked("file") for other in blocks_of(block.page)}
            assert script in {*files, "train.py"} or (ROOT / script).is_file(), script
        case ["bash", script, *_]:
            assert (ROOT / script).is_file(), script


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {
        option
        for action in parser._actions  # noqa: SLF001  # argparse has no other way
        for option in action.option_strings
        if option.startswith("--")
    }


def parser_of(command: str) -> argparse.ArgumentParser:
    [commands] = [
        action
        for action in make_parser([command])._actions  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction)  # noqa: SLF001
    ]
    found: argparse.ArgumentParser = commands.choices[command]
    return found


OPTIONS = {command: options_of(parser_of(command)) for command in COMMANDS}
# Options that prose names of other programs: pytest, the runner of pages, XLA, torchrun and scripts
# of the reader. Those of Paddle's launchers are looked up in `jaxfleet/launch`.
FOREIGN = {
    "--checkpoints",
    "--check",
    "--cpu-seconds",
    "--dist",
    "--durations",
    "--grid",
    "--host-discovery-script",
    "--max-np",
    "--min-np",
    "--nnodes",
    "--nproc-per-node",
    "--randomly-seed",
    "--xla_cpu_multi_thread_eigen",
}
INTERNAL = {"--help", "--standby"}  # `jaxfleet launch` gives --standby to its spare
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def prose_of(page: str) -> str:
    """Returns a page without its fenced blocks, whose commands are parsed."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", pages())
def test_every_option_that_prose_names_exists(page: str) -> None:
    prose = prose_of(page)
    launchers = [
        ROOT / "jaxfleet/launch/paddle_launch.py",
        ROOT / "jaxfleet/launch/paddle_launch_ps.py",
    ]
    scripts = [ROOT / script for script in re.findall(r"(?:benchmarks|examples)/\w+\.py", prose)]
    texts = "\n".join(path.read_text(encoding="utf-8") for path in [*launchers, *scripts])
    known = set().union(*OPTIONS.values(), FOREIGN, OPTION.findall(texts))
    assert sorted({*OPTION.findall(prose)} - known) == []


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_an_option_that_prose_gives_a_command_is_one_of_it(command: str) -> None:
    spans = re.findall(
        rf"`jaxfleet {command}\b([^`]*)`", "\n".join(prose_of(page) for page in pages())
    )
    named = {option for span in spans for option in OPTION.findall(span.split(".py")[0])}
    assert sorted(named - OPTIONS[command]) == []


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_option_of_a_command_is_on_a_page_that_names_the_command(command: str) -> None:
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in pages()]
    text = "\n".join(text for text in texts if f"jaxfleet {command}" in text)
    named = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text)) | INTERNAL
    spellings = [a.option_strings for a in parser_of(command)._actions if a.option_strings]  # noqa: SLF001
    assert [options for options in spellings if named.isdisjoint(options)] == []
