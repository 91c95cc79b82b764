"""The user's lines are distinguished from those of libraries."""

import functools
from pathlib import Path
from typing import Any

import jax
import optax
import pytest

import jaxfleet
from jaxfleet.ir import Source
from jaxfleet.ir.source import MOST_CALLERS
from jaxfleet.ops.user_frames import is_library, line_of_caller, line_of_error, line_of_function


@pytest.mark.parametrize("module", [jax, optax, jaxfleet, functools, pytest])
def test_a_library_is_what_jax_is_made_of_and_python(module: Any) -> None:
    assert is_library(module.__file__) == (module is not pytest)


@pytest.mark.parametrize(
    ("file", "library"),
    [
        (__file__, False),
        ("/home/user/jax/train.py", False),
        ("<stdin>", False),
        ("<ipython-input-3-0a1b>", False),
        ("<frozen importlib._bootstrap>", True),
        ("<string>", True),
        ("", True),
    ],
)
def test_a_file_of_the_users_is_any_other(file: str, library: bool) -> None:
    assert is_library(file) == library


def test_the_callers_line_is_the_one_that_runs() -> None:
    source = line_of_caller()  # here
    assert source is not None
    assert source.where().endswith("source = line_of_caller()  # here")
    assert source.function == "test_the_callers_line_is_the_one_that_runs"


def test_an_errors_line_is_the_innermost_of_the_users() -> None:
    def wrong(x: Any) -> Any:
        return optax.apply_updates(x, "no tree of its structure")  # innermost

    with pytest.raises(ValueError, match="structure") as caught:
        wrong({"a": 1.0})
    source = line_of_error(caught.value)
    assert source is not None
    assert source.where().endswith("# innermost")


def decorated(x: int) -> int:
    return x


class Callable:
    def __call__(self, x: int) -> int:
        return x


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (decorated, "decorated"),
        (functools.partial(decorated, 1), "decorated"),
        (jax.jit(decorated), "decorated"),
        (Callable(), "Callable.__call__"),
        (Callable().__call__, "Callable.__call__"),
    ],
)
def test_a_functions_line_is_where_it_is_defined(function: Any, name: str) -> None:
    source = line_of_function(function)
    assert source is not None
    assert (Path(source.file).name, source.function) == ("test_user_frames.py", name)


def test_a_function_that_is_not_pythons_has_no_line() -> None:
    assert line_of_function(len) is None


_SCRIPT = """
def deep(depth):
    return deep(depth - 1) if depth else line_of_caller(nested=True)
found = deep(DEPTH)
"""


def _deep(depth: int) -> Source:
    names: dict[str, Any] = {"line_of_caller": line_of_caller, "DEPTH": depth}
    exec(compile(_SCRIPT, "/home/app/train.py", "exec"), names)  # noqa: S102  # as a script runs
    found: Source = names["found"]
    return found


def test_the_callers_line_has_the_calls_that_lead_to_it_if_asked_for() -> None:
    source = _deep(1)
    calls = [(frame.function, frame.line) for frame in source.callers]
    assert calls == [("<module>", 4), ("deep", 3)]
    assert (source.function, source.line) == ("deep", 3)
    plain = line_of_caller()
    assert plain is not None
    assert plain.callers == ()


def test_a_recursion_keeps_its_outermost_calls() -> None:
    source = _deep(300)
    assert len(source.callers) == MOST_CALLERS
    assert source.callers is _deep(200).callers
