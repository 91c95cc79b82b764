"""Readers of jaxprs for any JAX line: wrapped computations and source lines of equations.

jax 0.10 and 0.12 differ in the contents of a scan's equation, in whether a closed jaxpr is a
separate class, and in primitives composed of others.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax.extend import core

from jaxfleet.ir import Source
from jaxfleet.ops.user_frames import is_library

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
    """A computation that an equation wraps without changing it.

    Attributes:
        body: the computation.
        inputs: indices of the equation's inputs that it takes.
    """

    body: Jaxpr
    inputs: Sequence[int]


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
    for frame in traceback.frames if traceback is not None else ():
        if not is_library(frame.file_name):
            return Source(frame.file_name, frame.line_num, frame.function_name, scope)
    return Source(scope=scope)


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
    info = getattr(open_jaxpr(jaxpr)[0], "debug_info", None)
    where = str(getattr(info, "func_src_info", "") or "")  # `relu at /a/nn.py:12`
    return is_library(where.rpartition(" at ")[2].rpartition(":")[0])


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
