"""Operators that run on the host: `py_func`, a function of the script, and `print`.

A program names a function by its place of definition and a digest of its code and of the values
that it holds, so a program read in another process finds the same function there, or none.
"""

import hashlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental import io_callback

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Operator
from jaxfleet.ops.fluid.arrays import device_dtype
from jaxfleet.ops.fluid.schema import (
    Attributes,
    BySlot,
    Gradient,
    attributes,
    define_gradient,
    describe,
    fluid_op,
)
from jaxfleet.ops.registry import Array, Context, register_op

HostFunction: TypeAlias = Callable[..., Any]


@dataclass
class _Host:
    functions: dict[str, HostFunction] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards registration
    printed: Counter[int] = field(default_factory=Counter)  # number of prints, by key
    numbers: Iterator[int] = field(default_factory=lambda: count(1))


_HOST = _Host()
_DIGEST_CHARACTERS = 12
_DEPTH = 8  # of values within values that a digest covers; of an object only its plain attributes


def register_function(function: HostFunction) -> str:
    """Registers a function; returns its name in programs: `train.scale:5f2b8c01d9aa`.

    Functions of one name, such as those created in a loop, are numbered in the order of
    registration: `train.<lambda>:5f2b8c01d9aa#1` is the second.
    """
    name, functions = _name_of(function), _HOST.functions
    names = (f"{name}#{at}" if at else name for at in count())
    with _HOST.lock:
        return next(one for one in names if functions.setdefault(one, function) is function)


def _name_of(function: HostFunction) -> str:
    """Place of definition of a function, with a digest of its code and of the values it holds."""
    digest = hashlib.sha256(_described(function).encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{_place_of(function)}:{digest}"


def _place_of(function: Any) -> str:
    """Module and qualified name; of an object, those of its class."""
    if isinstance(function, partial):
        return _place_of(function.func)
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _described(value: object, depth: int = 0) -> str:
    """A representation that is equal in every process that runs the same script."""

    def all_of(values: Iterable[object]) -> Iterator[str]:
        return (_described(x, depth + 1) for x in values)

    match value:
        case None | bool() | int() | float() | complex() | str() | bytes():
            return repr(value)
        case np.ndarray() | np.generic() if value.dtype != object:
            return f"{value.dtype}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"
        case type() | ModuleType():
            return value.__name__
        case _ if depth > _DEPTH:
            return type(value).__qualname__
        case CodeType():
            parts = (value.co_code.hex(), *value.co_names, value.co_varnames, value.co_consts)
            return _described(parts, depth)
        case tuple() | list():
            return f"({','.join(all_of(value))})"
        case frozenset() | set():
            return f"{{{','.join(sorted(all_of(value)))}}}"
        case dict():
            return f"{{{','.join(all_of(value.items()))}}}"
    if determining := _parts(value):
        return _place_of(value) + _described(determining, depth)
    held = _described(getattr(value, "__dict__", None), max(depth + 1, _DEPTH - 2))
    code = getattr(type(value).__call__, "__code__", None) if callable(value) else None
    return _place_of(value) + _described(code, depth + 1) + held


def _parts(value: object) -> tuple[object, ...]:
    """What determines the results of a function; () for other objects, and functions in C."""
    match value:
        case FunctionType():
            cells = [_content(cell) for cell in value.__closure__ or ()]
            return (value.__code__, cells, value.__defaults__, value.__kwdefaults__)
        case MethodType():
            return (value.__func__, value.__self__)
        case partial():
            return (value.func, value.args, value.keywords)
    wrapped = getattr(value, "__wrapped__", None)  # such as that of a function under jit
    return () if wrapped is None else (wrapped,)


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def new_number() -> int:
    """A new key of the counter of prints."""
    return next(_HOST.numbers)


def _function(name: str, op: Operator | None = None) -> HostFunction:
    if name not in _HOST.functions:
        place = name.partition(":")[0]
        what = f"py_func: this process has registered no function '{name}'"
        if other := next((x for x in _HOST.functions if x.partition(":")[0] == place), None):
            what += f"; '{other}' has other code, or holds other values"
        hint = (
            "a saved program has no functions in it: build it in this process, or give "
            f"layers.py_func '{place}', as it was saved, in any program before this one runs"
        )
        raise ProgramError(what, op=op, hint=hint)
    return _HOST.functions[name]


def _called(name: str, like: Sequence[jax.ShapeDtypeStruct], *given: Array) -> list[Array]:
    """Calls a function of the script with numpy arrays, within a computation."""
    function = _function(name)

    def run(*arrays: Any) -> tuple[np.ndarray[Any, Any], ...]:
        made = function(*map(np.asarray, arrays))
        many = made if isinstance(made, list | tuple) else [made]
        if len(many) != len(like):
            raise ProgramError(f"py_func: '{name}' returns {len(many)} arrays for {len(like)}")
        pairs = zip(many, like, strict=True)
        return tuple(np.asarray(x).astype(to.dtype).reshape(to.shape) for x, to in pairs)

    if like:
        return list(jax.pure_callback(run, tuple(like), *given))

    def call(*arrays: Any) -> None:
        function(*map(np.asarray, arrays))

    io_callback(call, None, *given)
    return []


@register_op("py_func", has_effect=True)
def py_func(ctx: Context, op: Operator, values: Sequence[Array]) -> Sequence[Array]:
    """Calls a function of the script; its gradient calls another."""
    attrs = attributes(ctx, op, _SCHEMA)
    shapes = zip(attrs["out_shapes"], attrs["out_dtypes"], strict=True)
    like = [jax.ShapeDtypeStruct(tuple(shape), device_dtype(dtype)) for shape, dtype in shapes]
    forward, backward = attrs["forward_callable_id"], attrs["backward_callable_id"]
    for name in filter(None, (forward, backward)):
        _function(name, op)

    @jax.custom_vjp
    def call(given: list[Array]) -> list[Array]:
        return _called(forward, like, *given)

    def begin(given: list[Array]) -> tuple[list[Array], tuple[list[Array], list[Array]]]:
        made = call(given)
        return made, (given, made)

    def back(saved: tuple[list[Array], list[Array]], grads: list[Array]) -> tuple[list[Any]]:
        if not backward:
            return ([_no_gradient(x) for x in saved[0]],)
        return (_backward(attrs, *saved, grads),)

    call.defvjp(begin, back)
    return list(call([jax.numpy.asarray(x) for x in values]))


def _backward(
    attrs: Attributes, given: list[Array], made: list[Array], grads: list[Array]
) -> list[Any]:
    """Gradients of floating-point inputs; integers have none."""
    named = zip(attrs["names"], [*given, *made], strict=True)
    read = [x for name, x in named if name not in attrs["skipped"]]
    floats = [x for x in given if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)]
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in floats]
    rest = iter(_called(attrs["backward_callable_id"], like, *read, *grads))
    return [
        next(rest) if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact) else _no_gradient(x)
        for x in given
    ]


def _no_gradient(x: Array) -> Any:
    if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact):
        return jax.numpy.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


def _py_func_back(attrs: Attributes, reads: BySlot, grads: BySlot) -> BySlot:
    return {"X": _backward(attrs, reads["X"], reads["Out"], grads["Out"])}


_SCHEMA = describe(
    "py_func", inputs="X*?", outputs="Out*",
    attrs={"forward_callable_id": "", "backward_callable_id": "", "names": [], "skipped": [],
           "out_shapes": [], "out_dtypes": []},
    gradient=Gradient("py_func_grad", ("X", "Out"), ("X",), _py_func_back,
                      unless=("backward_callable_id", "")),
)  # fmt: skip
define_gradient("py_func")


def _print_back(attrs: Attributes, _: BySlot, grads: BySlot) -> BySlot:
    if attrs["print_phase"].upper() != "FORWARD":
        _show({**attrs, "variable": attrs["variable"] + "@GRAD", "number": -attrs["number"]},
              grads["Out"])  # fmt: skip
    return {"In": grads["Out"]}


@fluid_op("print", inputs="In",
          attrs={"first_n": -1, "message": "", "summarize": 20, "print_tensor_name": True,
                 "print_tensor_type": True, "print_tensor_shape": True, "print_tensor_lod": True,
                 "print_tensor_layout": True, "print_phase": "BOTH", "variable": "",
                 "number": 0},
          gradient=Gradient("print_grad", (), ("In",), _print_back))  # fmt: skip
def print_op(attrs: Attributes, x: Array) -> Array:
    """Prints its input when the program runs, and returns it."""
    if attrs["print_phase"].upper() != "BACKWARD":
        _show(attrs, x)
    return x


def _show(attrs: Attributes, x: Array) -> None:
    def show(value: Any) -> None:
        _HOST.printed[attrs["number"]] += 1
        if 0 <= attrs["first_n"] < _HOST.printed[attrs["number"]]:
            return
        sys.stdout.write(_text(attrs, np.asarray(value)))
        sys.stdout.flush()

    jax.debug.callback(show, x)


def _text(attrs: Attributes, value: np.ndarray[Any, Any]) -> str:
    """Formats a variable as fluid does."""
    lines = [f"Variable: {attrs['variable']}"] if attrs["print_tensor_name"] else []
    if attrs["message"]:
        lines.append(f"  - message: {attrs['message']}")
    if attrs["print_tensor_lod"]:
        lines.append("  - lod: {}")
    if attrs["print_tensor_shape"]:
        lines.append(f"  - shape: {list(value.shape)}")
    if attrs["print_tensor_type"]:
        lines.append(f"  - dtype: {value.dtype}")
    most = attrs["summarize"] if attrs["summarize"] >= 0 else value.size
    shown = " ".join(str(x) for x in value.reshape(-1)[:most])
    return "\n".join([*lines, f"  - data: [{shown}]", ""])
