"""Writes the parameters of jax's primitives as attributes, reads them back, runs primitives.

This module and `jaxprs` contain all code that depends on a JAX line, using public interfaces only:
`jax.make_jaxpr`, `jax.extend.core`, `jax.export`, `jax.lax`.
"""

import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes  # noqa: F401  # registers bfloat16 and related dtypes with numpy
import numpy as np
from jax import export, lax
from jax.extend import core
from jax.extend.core import primitives

from jaxfleet.ir import Attr, Attrs, Dim, Literal, Size, Struct, Word, parse_size
from jaxfleet.ir.naming import INSTEAD_OF
from jaxfleet.ir.variable import long_dtype, short_dtype
from jaxfleet.ops.jaxprs import Equation

_HAVE_ACCURACY = (
    *("cbrt", "cos", "exp", "exp2", "expm1", "log", "log1p", "log2", "logistic"),
    *("rsqrt", "sin", "sqrt", "tan", "tanh"),
)
# Parameters that the IR omits if they are None; restored when an operator runs.
_OMITTED: Mapping[str, tuple[str, ...]] = {
    "broadcast_in_dim": ("sharding",),
    "convert_element_type": ("sharding",),
    "iota": ("sharding",),
    "reshape": ("sharding", "dimensions"),
    "dot_general": ("precision", "out_sharding", "preferred_element_type"),
    "conv_general_dilated": ("precision", "preferred_element_type"),
    "gather": ("fill_value",),
    "mul": ("out_dtype",),
    "slice": ("strides",),
    **{f"reduce_{name}": ("out_sharding",) for name in ("sum", "max", "min", "prod")},
    **dict.fromkeys(_HAVE_ACCURACY, ("accuracy",)),
}
# Parameters that `jax.lax` computes itself when the operator runs.
_SCATTERS = ("", "-add", "-sub", "-mul", "-min", "-max")
_REMADE: Mapping[str, tuple[str, ...]] = {
    f"scatter{kind}": ("update_jaxpr", "update_consts") for kind in _SCATTERS
}


def find_primitive(name: str) -> Any | None:
    """Returns the primitive of a name, or None if this JAX line has no such public one."""
    return _primitive_table().get(name) or getattr(lax, f"{name}_p", None)


@functools.cache
def _primitive_table() -> Mapping[str, Any]:
    found = (getattr(primitives, name) for name in dir(primitives) if name.endswith("_p"))
    return {primitive.name: primitive for primitive in found}


def dtype_text(dtype: Any) -> str:
    """Returns the IR's name of a dtype: `f32`, or `key<fry>` for random keys."""
    return short_dtype(str(dtype.name))


def numpy_dtype(short: str) -> np.dtype[Any]:
    """Returns the numpy dtype of an IR name."""
    return np.dtype(long_dtype(short))


def size_of(size: Any) -> Size:
    """Returns an axis's size as IR data."""
    return parse_size(str(size)) if export.is_symbolic_dim(size) else int(size)


def shape_text(shape: Sequence[Any]) -> tuple[Size, ...]:
    """Returns a shape as IR data."""
    return tuple(size_of(size) for size in shape)


def literal_of(value: Any, dtype: Any) -> Literal:
    """Returns a scalar literal."""
    return Literal.of(np.asarray(value).astype(dtype).item(), dtype_text(dtype))


def literal_value(literal: Literal) -> np.ndarray[Any, Any]:
    """Returns a literal as a numpy scalar of its dtype."""
    return np.asarray(literal.value, dtype=numpy_dtype(literal.dtype))


def encode_params(eqn: Equation) -> Attrs:
    """Returns the parameters of an equation without sub-jaxprs as attributes."""
    omitted = _OMITTED.get(eqn.primitive.name, ())
    remade = _REMADE.get(eqn.primitive.name, ())
    found = {}
    for name, value in eqn.params.items():
        if name in remade or (name in omitted and (value is None or "sharding" in name)):
            continue
        found[name] = encode(value)
    return Attrs(found)


def encode(value: Any) -> Attr:
    """Returns a parameter's value as data; raises a TypeError for a function or another object."""
    match value:
        case None | bool() | str():
            return value
        case enum.Enum():
            return Word(f"{type(value).__name__}.{value.name}")
        case int() | np.integer():
            return int(value)
        case float() | np.floating():
            return float(value)
        case np.dtype():
            return Word(dtype_text(value))
        case core.Primitive():
            return Word(f"primitive.{value.name}")
        case tuple() if hasattr(value, "_fields"):
            return _encode_named(value)
        case tuple() | list():
            return tuple(encode(item) for item in value)
    if export.is_symbolic_dim(value):
        return size_of(value)
    raise TypeError(f"{type(value).__name__} {value!r:.80}")


def _encode_named(value: Any) -> Attr:
    kind = type(value).__name__
    if kind == "PRNGImpl":
        return str(value.name)
    return Struct(kind, Attrs({name: encode(getattr(value, name)) for name in value._fields}))


def decode(attr: Attr, size: Callable[[Size], int]) -> Any:
    """Returns a parameter's value from data; symbolic sizes become numbers."""
    match attr:
        case Dim():
            return size(attr)
        case Literal():
            return literal_value(attr)
        case Word(text) if "." in text:
            kind, member = text.split(".")
            if kind == "primitive":
                return find_primitive(member)
            return (jax.memory.Space if kind == "MemorySpace" else getattr(lax, kind))[member]
        case Word(text):
            return float("nan") if text == "nan" else numpy_dtype(text)
        case Struct():
            fields = {name: decode(value, size) for name, value in attr.fields.items()}
            return getattr(lax, attr.name)(**fields)
        case tuple():
            return tuple(decode(item, size) for item in attr)
    return attr


def bind(name: str, args: Sequence[Any], attrs: Attrs, size: Callable[[Size], int]) -> list[Any]:
    """Runs a primitive by name; raises a KeyError if this JAX line lacks it."""
    primitive = find_primitive(name)
    if primitive is None:
        raise KeyError(name)
    params = {key: decode(x, size) for key, x in attrs.items() if key != INSTEAD_OF}
    for key in _OMITTED.get(name, ()):
        params.setdefault(key, None)
    result = primitive.bind(*args, **params)
    return list(result) if primitive.multiple_results else [result]
