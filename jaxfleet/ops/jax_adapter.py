"""Readers of jaxprs, and jax's primitives as data: all code that depends on a JAX line.

Parameters of primitives are written as attributes and read back; primitives run by name. Public
interfaces only: `jax.make_jaxpr`, `jax.extend.core`, `jax.export`, `jax.lax`.

jax 0.10 and 0.12 differ in the contents of a scan's equation, in whether a closed jaxpr is a
separate class, and in primitives composed of others.
"""

import enum
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import ml_dtypes  # noqa: F401  # registers bfloat16 and related dtypes with numpy
import numpy as np
from jax import export, lax
from jax.extend import core
from jax.extend.core import primitives

from jaxfleet.ir import Attr, Attrs, Dim, Frame, Literal, Size, Source, Struct, Word, parse_size
from jaxfleet.ir.naming import INSTEAD_OF
from jaxfleet.ir.variable import long_dtype, short_dtype
from jaxfleet.ops.user_frames import is_library, is_tracer, shared_callers

Jaxpr: TypeAlias = Any
Equation: TypeAlias = Any

# Primitives that only wrap a computation.
_CALLS = frozenset(
    {
        *("jit", "pjit", "closed_call", "core_call", "call", "eval_jaxpr"),
        *("custom_jvp_call", "custom_vjp_call"),
    }
)
_WRAPPER = re.compile(r"[\w<>]*\(")


@dataclass(frozen=True)
class Loop:
    """The division of a scan's operands."""

    num_consts: int
    num_carry: int


@dataclass(frozen=True)
class Call:
    """A computation that an equation wraps without changing it."""

    body: Jaxpr
    inputs: Sequence[int]  # indices of the equation's inputs that it takes


def open_jaxpr(value: Jaxpr) -> tuple[Jaxpr, Sequence[Any]]:
    """Returns a jaxpr that may be closed as an open one, and the constants of its constvars."""
    consts = getattr(value, "consts", ())
    return getattr(value, "jaxpr", value), consts


def is_literal(atom: object) -> bool:
    """Whether an equation's input is a literal."""
    return isinstance(atom, core.Literal)


def call_of(eqn: Equation) -> Call | None:
    """Returns the computation that an equation wraps, or None.

    The derivatives of `custom_jvp`, `custom_vjp` and of linear solves have been taken by the time a
    training step is traced, so only the computation remains of them.
    """
    name = eqn.primitive.name
    if name in _CALLS:
        body = eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
        return Call(body, range(len(eqn.invars)))
    if name == "custom_linear_solve":
        consts, bodies = eqn.params["const_lengths"], eqn.params["jaxprs"]
        before = consts.matvec + consts.vecmat
        own = range(before, before + consts.solve)
        return Call(bodies.solve, [*own, *range(sum(consts), len(eqn.invars))])
    if name == "call_hi_primitive":
        return Call(_expanded(eqn), range(len(eqn.invars)))
    return None


def _expanded(eqn: Equation) -> Jaxpr:
    """Returns the expansion of a jax 0.12 primitive composed of others."""
    primitive = eqn.params["_prim"]

    def expand(*leaves: Any) -> Any:
        args = jax.tree_util.tree_unflatten(primitive.in_tree, leaves)
        return jax.tree_util.tree_leaves(primitive.expand(*args))

    avals = [variable.aval for variable in eqn.invars]
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals]
    return jax.make_jaxpr(expand)(*types)


def loop_of(eqn: Equation) -> Loop:
    """Returns the division of a scan's operands on this JAX line."""
    params = eqn.params
    if "num_consts" in params:
        return Loop(params["num_consts"], params["num_carry"])
    consts, carry, _ = params["ft_in"].unpack()
    return Loop(len(consts), len(carry))


def source_of(eqn: Equation) -> Source:
    """Returns the user's line that made an equation: the innermost frame outside libraries."""
    traceback = eqn.source_info.traceback
    scope = clean_scope(str(eqn.source_info.name_stack))
    # `traceback.frames` would make every frame's texts, which takes 20 times as long
    codes, places = traceback.raw_frames() if traceback is not None else ((), ())
    found = []
    for code, at in zip(codes, places, strict=True):
        if is_tracer(code.co_filename):
            break
        if not is_library(code.co_filename):
            line = traceback.code_addr2line(code, at)
            found.append(Frame(code.co_filename, line, code.co_qualname))
    if not found:
        return Source(scope=scope)
    return Source(*found[0], scope=scope, callers=shared_callers(tuple(found[:0:-1])))


def body_name(body: Jaxpr) -> str:
    """Returns the name of the function that a jaxpr was traced from; empty if it is not known."""
    return _traced_from(body)[0]


def first_use(jaxpr: Jaxpr, variable: Any) -> Source:
    """Returns the user's line that first reads a variable of an open jaxpr."""
    readers = (eqn for eqn in jaxpr.eqns if variable in eqn.invars)
    eqn = next(readers, None)
    return source_of(eqn) if eqn is not None else Source()


def stack_of(eqn: Equation) -> str:
    """Returns an equation's name stack as jax prints it: `transpose(jvp(CNN))/Conv_0`."""
    return str(eqn.source_info.name_stack)


def clean_scope(stack: str) -> str:
    """Returns a name stack without the transformations around its names."""
    bare = _WRAPPER.sub("", stack).replace(")", "")
    return "/".join(part for part in bare.split("/") if part)


def is_library_function(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr was traced from a function of a library."""
    return is_library(_traced_from(jaxpr)[1])


def _traced_from(jaxpr: Jaxpr) -> tuple[str, str]:
    """Returns the name of the function that a jaxpr was traced from, and its file."""
    info = getattr(open_jaxpr(jaxpr)[0], "debug_info", None)
    where = str(getattr(info, "func_src_info", "") or "")  # `relu at /a/nn.py:12`
    name, _, place = where.rpartition(" at ")
    return name, place.rpartition(":")[0]


def read_arguments(value: Jaxpr) -> list[bool]:
    """Whether each argument of a jaxpr affects its results, or an effect.

    An argument only passed to a wrapped computation that ignores it does not.
    """
    jaxpr, _ = open_jaxpr(value)
    live = {atom for atom in jaxpr.outvars if not is_literal(atom)}
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not live.isdisjoint(eqn.outvars):
            live.update(atom for atom in _needed_inputs(eqn) if not is_literal(atom))
    return [argument in live for argument in jaxpr.invars]


def _needed_inputs(eqn: Equation) -> Sequence[Any]:
    call = call_of(eqn)
    if call is None:
        return list(eqn.invars)
    used = read_arguments(call.body)
    return [eqn.invars[at] for at, is_read in zip(call.inputs, used, strict=True) if is_read]


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
