"""Checks of a pass's output, and the example programs in its docstring."""

import difflib
import re
from inspect import cleandoc

from jaxfleet.ir import Program, parse
from jaxfleet.pipeline import Pass, pass_text, run_pipeline

_EXAMPLE = re.compile(r"^Before::\n(.*?)^After::\n(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)


def docstring_programs(cls: type[Pass]) -> list[tuple[str, str]]:
    """Returns the (before, after) texts in a pass's docstring, in order.

    Examples:
        >>> from jaxfleet.passes import DeadCodeElimination
        >>> from jaxfleet.testing import docstring_programs
        >>> before, after = docstring_programs(DeadCodeElimination)[0]
        >>> len(before.split()) > len(after.split())
        True
    """
    return _EXAMPLE.findall(cleandoc(cls.__doc__ or ""))


def check_pass(pass_: Pass, *, before: str, after: str) -> None:
    """Checks that a pass turns one valid program into another.

    Indentation and comments of the texts do not matter; everything else that prints does.

    Raises:
        AssertionError: the pass returned another program; shows a diff of the two texts.
        TextError: one of the texts does not parse.
        VerifyError: a program breaks a rule, before or after.

    Examples:
        >>> from jaxfleet.passes import DeadCodeElimination
        >>> from jaxfleet.testing import check_pass
        >>> before = '''program p
        ...   data x: f32[4]
        ...   block 0
        ...     forward
        ...       unused: f32[4] = jax.neg(x)
        ...       y: f32[4] = jax.tanh(x)
        ...     optimize
        ...       fetch(y)
        ... '''
        >>> after = before.replace("unused: f32[4] = jax.neg(x)", "")
        >>> check_pass(DeadCodeElimination(), before=before, after=after)
    """
    given = parse(before)
    returned = run_pipeline(given, [pass_])
    _check_same(f"{pass_text(pass_)} returned another program", parse(after), returned)
    _check_same("the pass changed the program that it was given", parse(before), given)
    _check_same("the result reads differently when parsed", returned, parse(str(returned)))


def _check_same(what: str, expected: Program, found: Program) -> None:
    texts = (str(expected), str(found))
    if texts[0] == texts[1]:
        return
    lines = [text.splitlines() for text in texts]
    diff = difflib.unified_diff(lines[0], lines[1], "expected", "found", n=100, lineterm="")
    raise AssertionError("\n".join([f"{what}:", *diff]))
