"""HTML of a program for notebooks: its text in colours, long parts cut short or folded.

A cell is stored in the notebook, so its size is bounded, however large the program.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import islice

from jaxfleet.ir.lexer import Line
from jaxfleet.ir.printer import print_program
from jaxfleet.ir.program import Program
from jaxfleet.ir.variable import Kind
from jaxfleet.notebook import Markup, element, folded, head, joined, shown

_WHOLE = 80  # lines of a part that is not cut short
_HEAD, _TAIL = 40, 12  # lines of one that is
_OPEN = 16  # declarations that need no click
_BLOCKS = 12  # sub-blocks
_WIDEST = 400  # characters of a line
_BLOCK = re.compile(r"  block \d")
_HEADINGS = frozenset({"program", "block", *(kind.value for kind in Kind)})
_NUMBER = re.compile(r"-?(?:[0-9]|inf\b|nan\b)")
_KINDS = (("param", "parameter"), ("state", "state"), ("data", "data"), ("const", "constant"))


def program_html(program: Program) -> str:
    """Returns the representation of a program."""
    lines = print_program(program).split("\n")
    begins = [at for at, line in enumerate(lines) if _BLOCK.match(line)]
    parts = [lines[a:b] for a, b in zip([1, *begins], [*begins, len(lines)], strict=True)]
    declared = parts[0]
    text = [element("pre", _line(lines[0]))]
    if declared:
        text.append(folded(_declared(program), _code(declared), is_open=len(declared) <= _OPEN))
    blocks = zip(program.blocks, parts[1:], strict=True)
    for block, part in islice(blocks, 1 + _BLOCKS):
        label = f"block {block.index}: {_count(len(block.ops), 'operator')}"
        text.append(folded(label, _code(part), is_open=block.index == 0))
    if more := program.blocks[1 + _BLOCKS :]:
        count = _count(sum(len(block.ops) for block in more), "operator")
        text.append(_left_out(f"{_count(len(more), 'block')} with {count}"))
    return shown(head("Program", program.name, *_facts(program)), *text)


def _facts(program: Program) -> Iterator[str]:
    yield _count(program.op_count, "operator")
    if len(program.blocks) > 1:
        yield _count(len(program.blocks), "block")
    yield _count(len(program.variables), "variable")


def _declared(program: Program) -> str:
    counts = ((len(program.of_kind(Kind(kind))), noun) for kind, noun in _KINDS)
    return "variables: " + ", ".join(
        f"{count:,} {noun}" if noun in {"state", "data"} else _count(count, noun)
        for count, noun in counts
        if count
    )


def _code(lines: Sequence[str]) -> Markup:
    if len(lines) <= _WHOLE:
        return element("pre", _colored(lines))
    count = len(lines) - _HEAD - _TAIL
    return joined(
        element("pre", _colored(lines[:_HEAD])),
        _left_out(_count(count, "line")),
        element("pre", _colored(lines[-_TAIL:])),
    )


def _left_out(what: str) -> Markup:
    return element(
        "div",
        f"\u2026 {what} left out: ",
        element("code", "print(program)"),
        " prints all of them, ",
        element("code", "step.view(path)"),
        " shows them in a browser",
        class_="p",
    )


def _colored(lines: Sequence[str]) -> Markup:
    return joined(*(part for line in lines for part in (_line(line), "\n")))


def _line(text: str) -> Markup:
    """Returns a line of IR text in colours."""
    shown = text if len(text) <= _WIDEST else f"{text[:_WIDEST]} \u2026"
    parts: list[str] = []
    at = depth = 0
    has_type = False
    words = list(Line.words.finditer(shown))
    for number, match in enumerate(words):
        word, follows = match[0], shown[match.end() : match.end() + 1]
        before = shown[at : match.start()]
        kind = ""
        depth += (word == "{") - (word == "}")
        if word.startswith("#"):
            kind = "p"
        elif number == 0 and (word in _HEADINGS or len(words) == 1):
            kind = "k"
        elif has_type:
            kind = "t"
        elif depth and follows == "=":
            kind = "a"
        elif _NUMBER.match(word) or (depth and word not in "{}[](),=^"):
            kind = "l"
        elif follows == "(" and not depth:
            kind = "o"
        has_type = word == ":" and not depth
        parts += [before, element("span", word, class_=kind) if kind else word]
        at = match.end()
    return joined(*parts, shown[at:])


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
