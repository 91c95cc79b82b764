"""Errors of the parser."""

import pytest

from jaxfleet.errors import TextError
from jaxfleet.ir import parse

HEAD = "program p\n  data  x: f32[b]\n  block 0\n    forward\n"  # an operator would be line 5

MISTAKES = {
    "no program": ("# nothing", "expected a program, found none"),
    "two programs": ("program p\nprogram q", "expected one program, found 'p', 'q'"),
    "no heading": (
        "x = f(y)",
        "line 1: expected a line 'program NAME' first, found 'x': x = f(y)",
    ),
    "an operator before a block": (
        "program p\n  f(x)",
        "line 2: expected a declaration or 'block 0', found 'f': f(x)",
    ),
    "an operator before a role": (
        "program p\n  block 0\n    f(x)",
        (
            "line 3: expected a role heading such as 'forward' before the first operator, "
            "found 'f': f(x)"
        ),
    ),
    "a misspelled role": (
        HEAD + "    foward",
        "line 5: expected a role heading, a declaration or an operator, found 'foward': foward",
    ),
    "a block out of order": (HEAD + "  block 2", "line 5: expected block 1: block 2"),
    "a block without a number": (
        HEAD + "  block one",
        "line 5: expected a whole number, found 'one': block one",
    ),
    "a block's arguments without results": (
        HEAD + "  block 1 (i: i32[])",
        "line 5: expected '->', found the end: block 1 (i: i32[])",
    ),
    "a declaration without a colon": (
        "program p\n  data x f32[b]",
        "line 2: expected ':', found 'f32[b]': data x f32[b]",
    ),
    "a type without sizes": (
        "program p\n  data x: f32",
        "line 2: expected a type such as f32[b,784], found 'f32': data x: f32",
    ),
    "a broken size": (
        "program p\n  data x: f32[2*]",
        "line 2: '2*' is not a size: data x: f32[2*]",
    ),
    "a variable declared twice": (
        "program p\n  data x: f32[]\n  data x: f32[]",
        "line 3: 'x' is declared twice: data x: f32[]",
    ),
    "an output typed twice": (
        HEAD + "      y: f32[], y: f32[] = f(x)",
        "line 5: 'y' is declared twice: y: f32[], y: f32[] = f(x)",
    ),
    "a parenthesis left open": (
        HEAD + "      y = f(x",
        "line 5: expected ',', found the end: y = f(x",
    ),
    "an operand left out": (
        HEAD + "      y = f(x,, x)",
        "line 5: expected a variable or a literal, found ',': y = f(x,, x)",
    ),
    "a literal without a dtype": (
        HEAD + "      y = f(2.0)",
        "line 5: expected ':' and the dtype of the literal 2.0, found ')': y = f(2.0)",
    ),
    "a string left open": (
        HEAD + '      y = f("x)',
        "line 5: expected a variable or a literal, found '\"': y = f(\"x)",
    ),
    "an unknown escape": (
        HEAD + '      y = f(x) {s="\\q"}',
        'line 5: expected a string, found \'"\\q"\': y = f(x) {s="\\q"}',
    ),
    "an attribute without a value": (
        HEAD + "      y = f(x) {a}",
        "line 5: expected '=', found '}': y = f(x) {a}",
    ),
    "an attribute twice": (
        HEAD + "      y = f(x) {a=1, a=2}",
        "line 5: attribute 'a' is given twice: y = f(x) {a=1, a=2}",
    ),
    "a size that needs no letter": (
        HEAD + "      y = f(x) {a=<3>}",
        "line 5: expected a size with a letter between < and >, found '<3>': y = f(x) {a=<3>}",
    ),
    "a broken number": (
        HEAD + "      y = f(x) {a=1.2.3}",
        "line 5: expected a number, found '1.2.3': y = f(x) {a=1.2.3}",
    ),
    "words behind an operator": (
        HEAD + "      y = f(x) z",
        "line 5: expected the end of the line, found 'z': y = f(x) z",
    ),
    "a role_var without its gradient": (
        HEAD + "      f(x) for (x)",
        "line 5: expected ',', found ')': f(x) for (x)",
    ),
    "a constant without an @": (
        "program p\n  const c: f32[2] = c12",
        (
            "line 2: expected '@' and a digest, or '[' and the values, found 'c12': "
            "const c: f32[2] = c12"
        ),
    ),
    "too few values": (
        "program p\n  const c: f32[2] = [1.0]",
        "line 2: the values do not fit f32[2]: const c: f32[2] = [1.0]",
    ),
    "values of another kind": (
        "program p\n  const c: i32[1] = [1.5]",
        "line 2: the values do not fit i32[1]: const c: i32[1] = [1.5]",
    ),
    "a value out of range": (
        "program p\n  const c: i8[1] = [300]",
        "line 2: a value is too large for i8: const c: i8[1] = [300]",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_parser_says_what_it_expected_and_where(mistake: str) -> None:
    text, message = MISTAKES[mistake]
    with pytest.raises(TextError) as caught:
        parse(text)
    assert str(caught.value) == message


def test_a_misspelled_role_is_answered_with_the_roles_there_are() -> None:
    with pytest.raises(TextError) as caught:
        parse(HEAD + "    foward")
    (hint,) = caught.value.__notes__
    assert hint.startswith("  hint: the roles are forward, forward|loss, backward")
