"""Traces a training step to a jaxpr, with the batch as a letter or as a number."""

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
from jax import export

from jaxfleet.capture import look_up_checks, refusals, tables
from jaxfleet.capture.builder import build
from jaxfleet.capture.finish import Interface, finish
from jaxfleet.capture.returned import Returned, check_state, read_returned
from jaxfleet.capture.signature import Signature
from jaxfleet.capture.tidy import tidy
from jaxfleet.capture.trees import Leaf, spec_of
from jaxfleet.ir import Attrs, Kind, Program, Source, Variable
from jaxfleet.ops import jax_adapter, jaxprs
from jaxfleet.ops.frames import line_of_function

BATCH_LETTER = "b"

Step: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Traced:
    """A step that was traced once.

    Attributes:
        program: what it does.
        metrics_tree: the structure of the metrics.
        metrics: their variables, in the order of the leaves.
        notes: what was decided, a line each.
        keys: leaves of the batch that are keys of tables, and go to no device.
    """

    program: Program
    metrics_tree: Any
    metrics: tuple[str, ...]
    notes: tuple[str, ...] = ()
    keys: frozenset[str] = frozenset()


def trace(
    step: Step,
    signature: Signature,
    *,
    rows: int | None,
    name: str,
) -> Traced:
    """Traces a step.

    Args:
        step: takes `(state, batch)`, returns `(state, metrics)`.
        signature: of an example of its arguments.
        rows: the number of rows to trace with; None for a letter.
        name: the program's name.

    Raises:
        CaptureError: the step is not of the form that can be captured.
    """
    returned: list[Returned] = []
    size = rows if rows is not None else export.symbolic_shape(BATCH_LETTER)[0]
    types = _types_of(signature, size)
    with tables.looking_up() as known:
        jaxpr = _make_jaxpr(_reading(step, returned), signature, types)
    check_state(returned[-1], jaxpr.out_avals, signature, step)
    count = len(signature.state)
    state = _variables(signature.state, types[:count], Kind.STATE)
    data = _variables(signature.batch, types[count:], Kind.DATA)
    draft = build(jaxpr, [variable.name for variable in (*state, *data)])
    tidied = tidy(draft, (*state, *data))
    draft = tidied.without_dead_ops()
    look_up_checks.check_gradients(tidied.blocks[0].ops, draft.blocks[0].ops)
    keys = look_up_checks.key_leaves(draft, state, data)
    only_keys = keys - look_up_checks.used_on_device(draft)
    data = [replace(v, dtype="i64") if v.name in only_keys else v for v in data]
    metrics = list(zip(returned[-1].metrics, draft.results[count:], strict=True))
    interface = Interface(state, data, draft.results[:count], metrics)
    attrs = Attrs({"batch": jax_adapter.size_of(size)})
    if used := look_up_checks.looked_up(draft):
        attrs = attrs.updated(tables=tuple(known[name].spec.to_text() for name in used))
    program = finish(draft, interface, name=name, attrs=attrs)
    notes = (*map(str, known.values()), *map(_kept_apart, draft.kept_rows))
    last = returned[-1]
    return Traced(program, last.metrics_tree, last.metrics, notes, frozenset(only_keys))


def _types_of(signature: Signature, rows: Any) -> list[jax.ShapeDtypeStruct]:
    """Returns the types to trace with, state first."""
    batch = (
        spec_of(leaf, (rows, *leaf.shape[1:])) if leaf.shape else spec_of(leaf)
        for leaf in signature.batch
    )
    return [*map(spec_of, signature.state), *batch]


def _reading(step: Step, returned: list[Returned]) -> Step:
    """Returns the step, which also puts down the structure of what it returns."""

    # jax names the user's function in its own errors by what `wraps` leaves on this one.
    @functools.wraps(step)
    def run(state: Any, batch: Any) -> tuple[Any, Any]:
        result = step(state, batch)
        returned.append(read_returned(result, step))
        return result

    return run


def types_of_results(step: Callable[..., Any], *types: Any) -> Any:
    """Returns the types of what a step returns for arguments of some types.

    Raises:
        CaptureError: the step reduces or is divided over devices by hand.
    """
    with tables.looking_up(), _explained(step, types):
        return jax.eval_shape(step, *types)


def _make_jaxpr(step: Step, signature: Signature, types: Sequence[Any]) -> jaxprs.Jaxpr:
    unflatten, count = jax.tree_util.tree_unflatten, len(signature.state)

    # A user's class may make arrays of its leaves: it gets tracers, and never their types.
    @functools.wraps(step)
    def on_leaves(state: Sequence[Any], batch: Sequence[Any]) -> tuple[Any, Any]:
        trees = unflatten(signature.state_tree, state), unflatten(signature.batch_tree, batch)
        return step(*trees)

    with _explained(on_leaves, (types[:count], types[count:])):
        jaxpr = jax.make_jaxpr(on_leaves)(types[:count], types[count:])
    if (name := refusals.division_in(jaxpr)) is not None:
        raise refusals.is_divided_by_hand(name, line_of_function(step))
    return jaxpr


@contextlib.contextmanager
def _explained(step: Callable[..., Any], args: Sequence[Any]) -> Iterator[None]:
    """Maps what jax raises of a step that is written for devices to a `CaptureError`."""
    try:
        yield
    except NotImplementedError as error:
        if (said := look_up_checks.is_batched(error)) is not None:
            raise said from error
        raise
    except NameError as error:  # what jax raises for a name that no mesh or pmap has bound
        if "axis name" not in str(error):
            raise
        raise refusals.reduces_by_hand(error) from error
    except ValueError as error:
        if (name := _divided_by(step, args)) is None:
            raise
        raise refusals.is_divided_by_hand(name, line_of_function(step)) from error


def _divided_by(step: Callable[..., Any], args: Sequence[Any]) -> str | None:
    """Returns whether `pmap` or `shard_map` refused a step's arguments, by tracing it again.

    jax leaves its own frames out of an error's traceback unless it is told not to.
    """
    config: Any = jax.config
    before = config.jax_traceback_filtering
    config.update("jax_traceback_filtering", "off")
    try:
        jax.eval_shape(step, *args)
    except Exception as error:  # noqa: BLE001  # only where it was raised counts
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
            leaf.name,
            jax_adapter.dtype_text(spec.dtype),
            jax_adapter.shape_text(spec.shape),
            kind,
        )
        for leaf, spec in zip(leaves, specs, strict=False)
    ]
