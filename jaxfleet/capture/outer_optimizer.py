"""Capture of an outer optimizer, which updates averaged parameters, as its own program."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax

from jaxfleet.capture.builder import build
from jaxfleet.capture.canonicalize import canonicalize
from jaxfleet.capture.pytrees import path_text
from jaxfleet.errors import StrategyError
from jaxfleet.ir import Attrs, Kind, Operand, Operands, Operator, Program, Role, Variable
from jaxfleet.ir.naming import grad_name
from jaxfleet.ops import jax_adapter

_STATE = "outer/"


def trace_outer(optimizer: Any, params: Sequence[Variable]) -> Program:
    """Traces an optimizer that takes the mean delta of all devices as its gradient.

    Args:
        optimizer: an `optax.GradientTransformation`.
        params: variables of parameters; the optimizer sees a dictionary of them by name.

    Returns:
        A program that writes each parameter anew. `w@GRAD` is data, the optimizer's state is
        `outer/...`, and the attribute `beside` holds its initial values.

    Raises:
        StrategyError: `optimizer` is not an optimizer, or the initial value of its state is neither
            a number nor a parameter.
    """
    params = sorted(params, key=lambda v: v.name)  # as jax flattens a dictionary of them
    types = {v.name: _type(v) for v in params}
    try:
        kept = jax.eval_shape(optimizer.init, types)
        jaxpr = jax.make_jaxpr(_step(optimizer))(types, kept, types)
    except (AttributeError, TypeError) as error:
        what = f"strategy: outer is {optimizer!r}, which cannot be traced as an optimizer"
        hint = "outer=optax.sgd(0.7, momentum=0.9, nesterov=True)"
        raise StrategyError(what, hint=hint) from error
    state = [_variable(path, leaf) for path, leaf in jax.tree.leaves_with_path(kept)]
    held = [*(replace(v, kind=Kind.PARAM) for v in params), *state]
    grads = [replace(v, name=grad_name(v.name), kind=Kind.DATA) for v in params]
    inputs = [*held, *grads]
    draft = canonicalize(build(jaxpr, [v.name for v in inputs]), inputs).without_dead_ops()
    if draft.constants:
        what = "strategy: the outer optimizer computes with an array of its own"
        raise StrategyError(what, hint="leave outer out, or use an optimizer without one")
    late = [_assign(v.name, x) for v, x in zip(held, draft.results, strict=True) if x != v.name]
    root = draft.blocks[0]
    begins = _begins(optimizer, types, [v.name for v in state])
    return Program(
        "outer",
        {v.name: v for v in inputs},
        (root.with_ops([*root.ops, *late]), *draft.blocks[1:]),
        Attrs({"beside": tuple(begins.items())}),
    )


def _step(optimizer: Any) -> Any:
    def step(params: Any, kept: Any, ways: Any) -> Any:
        updates, kept = optimizer.update(ways, kept, params)
        return optax.apply_updates(params, updates), kept

    return step


def _assign(name: str, value: Operand) -> Operator:
    return Operator("assign", Operands.of(value), Operands.of(name), role=Role.OPTIMIZE)


def _type(variable: Variable) -> jax.ShapeDtypeStruct:
    shape: Any = variable.shape
    return jax.ShapeDtypeStruct(shape, jax_adapter.numpy_dtype(variable.dtype))


def _variable(path: Any, leaf: Any) -> Variable:
    dtype, shape = jax_adapter.dtype_text(leaf.dtype), jax_adapter.shape_text(leaf.shape)
    return Variable(f"{_STATE}{path_text(path)}", dtype, shape, Kind.STATE)


def _begins(
    optimizer: Any, types: Mapping[str, jax.ShapeDtypeStruct], names: Sequence[str]
) -> dict[str, str | int | float]:
    """Returns the initial value of each leaf of the optimizer's state, found by two trials."""
    found: list[dict[str, str | int | float]] = []
    for seed in (0, 1):
        rng = np.random.default_rng(seed)
        params = {n: rng.normal(size=x.shape).astype(x.dtype) for n, x in types.items()}
        leaves = jax.tree.leaves(optimizer.init(params))
        pairs = zip(names, leaves, strict=True)
        found.append({name: _begin(name, np.asarray(leaf), params) for name, leaf in pairs})
    if found[0] != found[1]:
        differing = next(name for name in names if found[0][name] != found[1][name])
        raise _unknown(differing)
    return found[0]


def _begin(name: str, leaf: Any, params: Mapping[str, Any]) -> str | int | float:
    for param, value in params.items():
        if leaf.shape == value.shape and leaf.dtype == value.dtype and (leaf == value).all():
            return param
    if leaf.size and (leaf == leaf.flat[0]).all():
        number: int | float = leaf.flat[0].item()
        return number
    raise _unknown(name)


def _unknown(name: str) -> StrategyError:
    what = f"strategy: what the outer optimizer keeps as '{name}' begins with no number"
    return StrategyError(what, hint="outer is for optimizers that begin with numbers or parameters")
