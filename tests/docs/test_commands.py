"""Every command of the documentation exists and takes the arguments that a page gives it."""

import importlib.util
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator

import pytest

from jaxfleet.cli.app import make_parser
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


COMMANDS = [
    pytest.param(block, words, id=f"{block.place}-{words[0]}")
    for page in pages()
    for block in blocks_of(page)
    if block.language in {"bash", "console"}
    for words in commands_of(block)
]


@pytest.mark.parametrize(("block", "words"), COMMANDS)
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
