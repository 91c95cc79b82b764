"""Tracing of a training step to a jaxpr, with a symbolic or concrete batch size.

Also of an outer optimizer, which updates parameters between rounds of local steps.
"""

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
import optax
from jax import export

from jaxfleet.capture.builder import build
from jaxfleet.capture.canonicalize import canonicalize
from jaxfleet.capture.embedding import lookup, tables
from jaxfleet.capture.finalize import Interface, finalize
from jaxfleet.capture.primitives import division_in, is_divided_by_hand, reduces_by_hand
from jaxfleet.capture.signature import (
    Leaf,
    Outputs,
    Signature,
    check_state,
    path_text,
    read_outputs,
    spec_of,
)
from jaxfleet.errors import StrategyError
from jaxfleet.ir import Attrs, Kind, Operand, Operands, Operator, Program, Role, Source, Variable
from jaxfleet.ir.naming import grad_name
from jaxfleet.ops import jax_adapter
from jaxfleet.ops.user_frames import line_of_function

BATCH_LETTER = "b"

Step: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]
_STATE = "outer/"


@dataclass(frozen=True)
class Traced:
    """A traced step."""

    program: Program  # the computation
    metrics_tree: Any  # the structure of the metrics
    metrics: tuple[str, ...]  # their variables, in the order of the leaves
    notes: tuple[str, ...] = ()  # decisions, a line each
    # Leaves of the batch that are keys of tables, and are not sent to devices
    keys: frozenset[str] = frozenset()


def trace(step: Step, signature: Signature, *, rows: int | None, name: str) -> Traced:
    """Traces a step of `(state, batch)` with `rows` rows, or None for a symbolic batch size.

    Raises:
        CaptureError: the step cannot be captured.
    """
    returned: list[Outputs] = []
    size = rows if rows is not None else export.symbolic_shape(BATCH_LETTER)[0]
    types = _types_of(signature, size)
    with tables.looking_up() as known:
        jaxpr = _make_jaxpr(_reading(step, returned), signature, types)
    check_state(returned[-1], jaxpr.out_avals, signature, step)
    count = len(signature.state)
    state = _variables(signature.state, types[:count], Kind.STATE)
    data = _variables(signature.batch, types[count:], Kind.DATA)
    draft = build(jaxpr, [variable.name for variable in (*state, *data)])
    tidied = canonicalize(draft, (*state, *data))
    draft = tidied.without_dead_ops()
    lookup.check_gradients(tidied.blocks[0].ops, draft.blocks[0].ops)
    keys = lookup.key_leaves(draft, state, data)
    only_keys = keys - lookup.used_on_device(draft)
    data = [replace(v, dtype="i64") if v.name in only_keys else v for v in data]
    metrics = list(zip(returned[-1].metrics, draft.results[count:], strict=True))
    interface = Interface(state, data, draft.results[:count], metrics)
    attrs = Attrs({"batch": jax_adapter.size_of(size)})
    if used := lookup.looked_up(draft):
        attrs = attrs.updated(tables=tuple(known[name].spec.to_text() for name in used))
    program = finalize(draft, interface, name=name, attrs=attrs)
    notes = (*map(str, known.values()), *map(_kept_apart, draft.kept_rows))
    last = returned[-1]
    return Traced(program, last.metrics_tree, last.metrics, notes, frozenset(only_keys))


def _types_of(signature: Signature, rows: Any) -> list[jax.ShapeDtypeStruct]:
    batch = (
        spec_of(leaf, (rows, *leaf.shape[1:])) if leaf.shape else spec_of(leaf)
        for leaf in signature.batch
    )
    return [*map(spec_of, signature.state), *batch]


def _reading(step: Step, returned: list[Outputs]) -> Step:
    """Wraps the step to record the structure of its results."""

    # jax's errors name the user's function by the attributes that `wraps` copies.
    @functools.wraps(step)
    def run(state: Any, batch: Any) -> tuple[Any, Any]:
        result = step(state, batch)
        returned.append(read_outputs(result, step))
        return result

    return run


def types_of_results(step: Callable[..., Any], *types: Any) -> Any:
    """Returns the types of a step's results for arguments of some types.

    Raises:
        CaptureError: the step reduces or is divided over devices by hand.
    """
    with tables.looking_up(), _explained(step, types):
        return jax.eval_shape(step, *types)


def _make_jaxpr(step: Step, signature: Signature, types: Sequence[Any]) -> jax_adapter.Jaxpr:
    unflatten, count = jax.tree_util.tree_unflatten, len(signature.state)

    # A user's class may build arrays from its leaves: it gets tracers, and never their types.
    @functools.wraps(step)
    def on_leaves(state: Sequence[Any], batch: Sequence[Any]) -> tuple[Any, Any]:
        trees = unflatten(signature.state_tree, state), unflatten(signature.batch_tree, batch)
        return step(*trees)

    with _explained(on_leaves, (types[:count], types[count:])):
        jaxpr = jax.make_jaxpr(on_leaves)(types[:count], types[count:])
    if (name := division_in(jaxpr)) is not None:
        raise is_divided_by_hand(name, line_of_function(step))
    return jaxpr


@contextlib.contextmanager
def _explained(step: Callable[..., Any], args: Sequence[Any]) -> Iterator[None]:
    """Maps jax's errors about a step that is written for devices to a `CaptureError`."""
    try:
        yield
    except NotImplementedError as error:
        if (said := lookup.is_batched(error)) is not None:
            raise said from error
        raise
    except NameError as error:  # jax's error for a name that no mesh or pmap has bound
        if "axis name" not in str(error):
            raise
        raise reduces_by_hand(error) from error
    except ValueError as error:
        if (name := _divided_by(step, args)) is None:
            raise
        raise is_divided_by_hand(name, line_of_function(step)) from error


def _divided_by(step: Callable[..., Any], args: Sequence[Any]) -> str | None:
    """Returns whether `pmap` or `shard_map` rejected a step's arguments, by tracing it again.

    By default jax removes its own frames from an error's traceback.
    """
    config: Any = jax.config
    before = config.jax_traceback_filtering
    config.update("jax_traceback_filtering", "off")
    try:
        jax.eval_shape(step, *args)
    except Exception as error:  # noqa: BLE001  # only its origin matters
        frames = traceback.extract_tb(error.__traceback__)
        files = [Path(frame.filename).stem for frame in frames if "jax" in frame.filename]
        return next((name for name in ("pmap", "shard_map") if name in files), None)
    finally:
        config.update("jax_traceback_filtering", before)
    return None


def _kept_apart(source: Source) -> str:
    where = " ".join(source.where().split())
    return f"jax.checkpoint does nothing where it holds a look-up in a table ({where})"


def _variables(leaves: Sequence[Leaf], specs: Sequence[Any], kind: Kind) -> list[Variable]:
    return [
        Variable(
            leaf.name, jax_adapter.dtype_text(spec.dtype), jax_adapter.shape_text(spec.shape), kind
        )
        for leaf, spec in zip(leaves, specs, strict=False)
    ]


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
