"""A program in a notebook: its text, escaped and in colours, of bounded size."""

from hypothesis import given

from jaxfleet.ir import Attrs, Block, Kind, Operands, Operator, Program, Variable, parse
from jaxfleet.testing.programs import programs
from tests.markup import text_of

SMALL = """\
program mlp {devices=2}
  data  x: f32[b,784]
  param fc1.w: f32[784,128]
  block 0
    forward
      h: f32[b,128] = fc(x, fc1.w) {act="relu", body=^1, by=-0.5}
  block 1
    forward
      x = scale(x) {by=2.0}"""


def spans(markup: str, kind: str) -> list[str]:
    return [part.split("<")[0] for part in markup.split(f'<span class="{kind}">')[1:]]


def wide(operators: int, name: str = "value") -> Program:
    """Returns a program of many operators with long lines."""
    declared = {f"{name}{n}": Variable(f"{name}{n}", "f32", (4, 4)) for n in range(operators + 1)}
    ops = [
        Operator(
            "scale", Operands.of(f"{name}{n}"), Operands.of(f"{name}{n + 1}"), Attrs({"by": 1.5})
        )
        for n in range(operators)
    ]
    first = {f"{name}0": Variable(f"{name}0", "f32", (4, 4), Kind.DATA)}
    return Program("wide", first, (Block(0, -1, declared, (), tuple(ops)),))


def test_types_names_and_values_have_colors_of_their_own() -> None:
    markup = parse(SMALL)._repr_html_()  # as notebooks call it
    assert spans(markup, "t") == ["f32[b,784]", "f32[784,128]", "f32[b,128]"]
    assert spans(markup, "o") == ["fc", "scale"]
    assert spans(markup, "a") == ["devices", "act", "body", "by", "by"]
    assert spans(markup, "k")[:3] == ["program", "data", "param"]
    assert {"&quot;relu&quot;", "-0.5", "2.0"} <= set(spans(markup, "l"))


def test_a_short_program_is_shown_whole() -> None:
    shown = text_of(parse(SMALL)._repr_html_())
    assert all(line in shown for line in SMALL.splitlines())
    assert "Program mlp \u00b7 2 operators \u00b7 2 blocks \u00b7 2 variables" in shown


def test_blocks_and_long_declarations_are_folded() -> None:
    markup = parse(SMALL)._repr_html_()
    assert markup.count("<details") == 3
    assert markup.count('<details open="">') == 2  # variables and block 0


@given(programs())
def test_any_program_is_balanced_and_complete(program: Program) -> None:
    shown = text_of(program._repr_html_())
    marks = ("\\x", "\\u", "\u2026")
    for line in str(program).splitlines():
        if line.isascii() and line.isprintable() and not any(mark in line for mark in marks):
            assert line in shown or "left out" in shown or len(line) > 400


def test_five_thousand_operators_make_a_small_cell() -> None:
    program = wide(5_000)
    markup = program._repr_html_()
    assert len(markup.encode()) < 60_000
    shown = text_of(markup)
    assert "4,951 lines left out: print(program) prints all of them, step.view(path) shows" in shown
    assert "value1: f32[4,4] = scale(value0)" in shown
    assert "value5000: f32[4,4] = scale(value4999)" in shown
    assert "value2500" not in shown


def test_many_blocks_and_long_lines_are_cut_too() -> None:
    ops = wide(70, "n" * 1_000).root.ops
    blocks = [Block(n, 0 if n else -1, {}, (), ops) for n in range(50)]
    markup = Program("p", {}, tuple(blocks))._repr_html_()
    assert len(markup.encode()) < 400_000
    assert "37 blocks with 2,590 operators left out" in text_of(markup)
