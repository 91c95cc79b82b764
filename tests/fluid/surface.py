"""Reads the table of `api_surface.md`, and compares its lines with `jaxfleet.fluid`."""

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxfleet import fluid
from jaxfleet.errors import ProgramError
from jaxfleet.ops import find_op
from jaxfleet.ops.fluid import schema_of
from tests.fluid.nets import fresh

TABLE = Path(__file__).with_name("api_surface.md")
_ROW = re.compile(r"\| `(?P<name>[^`]+)` \| (?P<part>\d) \|")
_EMPTY = inspect.Parameter.empty


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        text: verbatim.
        path: the name under `fluid`.
        part: the part of the plan that implements it.
    """

    text: str
    path: str
    part: int

    def difference(self) -> str:
        """Describes the difference of jaxfleet's; empty if there is none."""
        if self.path.startswith("op:"):
            op_type = self.path.removeprefix("op:")
            return "" if schema_of(op_type) is not None or _is_known(op_type) else "is missing"
        try:
            found = _found(self.path)
        except AttributeError:
            return "is missing"
        if "(" in self.text and " = " not in self.text.partition("(")[0]:
            return _called_otherwise(found, _arguments(self.text))
        if " = " in self.text:
            wanted = _value(self.text.partition(" = ")[2])
            return "" if found == wanted else f"is {found!r}"
        return ""


def rows() -> list[Row]:
    found = _ROW.finditer(TABLE.read_text(encoding="utf-8"))
    return [
        Row(match["name"], re.split(r"[( ]", match["name"])[0], int(match["part"]))
        for match in found
    ]


def _is_known(op_type: str) -> bool:
    try:
        find_op(op_type)
    except ProgramError:
        return False
    return True


def _found(path: str) -> Any:
    """Returns the object at a path; fields of a class are also looked up in an instance."""
    at: Any = fluid
    for name in path.split("."):
        at = _member(at, name)
    return at


def _member(at: Any, name: str) -> Any:
    if isinstance(at, ModuleType) and not hasattr(at, name):
        try:
            return import_module(f"{at.__name__}.{name}")
        except ModuleNotFoundError as error:
            raise AttributeError(name) from error
    if inspect.isclass(at) and not inspect.isroutine(getattr(at, name, None)):
        made = instances().get(at.__name__)
        if made is not None and not inspect.isclass(getattr(at, name, None)):
            return getattr(made(), name)
    return getattr(at, name)


@cache
def instances() -> Mapping[str, Callable[[], Any]]:
    """Returns a factory of instances for each class with fields in the table."""
    with fresh() as (main, _):
        x = fluid.data("x", [None, 2])
        fluid.layers.fc(x, 1)
    block = main.global_block()
    return {
        "Block": lambda: block,
        "BuildStrategy": fluid.BuildStrategy,
        "DistributeTranspilerConfig": fluid.DistributeTranspilerConfig,
        "ExecutionStrategy": fluid.ExecutionStrategy,
        "Operator": lambda: block.ops[0],
        "ParallelExecutor": lambda: fluid.ParallelExecutor(use_cuda=False, main_program=main),
        "Parameter": lambda: main.all_parameters()[0],
        "Program": fluid.Program,
        "PSDispatcher": lambda: fluid.transpiler.PSDispatcher(["a:1"]),
        "Variable": lambda: x,
    }


def _arguments(text: str) -> dict[str, Any]:
    """Returns the arguments of a written call with their defaults."""
    given = text[text.index("(") + 1 : text.rindex(")")]
    (lambda_,) = ast.parse(f"lambda {given}: 0").body
    assert isinstance(lambda_, ast.Expr)
    assert isinstance(lambda_.value, ast.Lambda)
    args = lambda_.value.args
    defaults = [ast.literal_eval(node) for node in args.defaults]
    names = [arg.arg for arg in args.args]
    return dict(zip(names, [_EMPTY] * (len(names) - len(defaults)) + defaults, strict=True))


def _called_otherwise(found: Any, wanted: Mapping[str, Any]) -> str:
    """Describes the difference of a call; additional arguments with defaults are allowed."""
    parameters = list(inspect.signature(found).parameters.values())
    if parameters and parameters[0].name == "self" and not inspect.isclass(found):
        parameters = parameters[1:]
    ours = {one.name: one.default for one in parameters}
    for (name, default), (our_name, our_default) in zip(wanted.items(), ours.items(), strict=False):
        if name != our_name:
            return f"takes {our_name} where {name} stands"
        if default is not our_default and (type(default), default) != (
            type(our_default),
            our_default,
        ):
            return f"has {name}={our_default!r}"
    if len(ours) < len(wanted):
        return f"does not take {', '.join(list(wanted)[len(ours) :])}"
    return "".join(f"demands {name}" for name in list(ours)[len(wanted) :] if ours[name] is _EMPTY)


def _value(text: str) -> Any:
    if re.fullmatch(r"[A-Za-z.]+", text) and text not in {"True", "False", "None"}:
        return reduce(getattr, text.split("."), fluid)
    return ast.literal_eval(text)
