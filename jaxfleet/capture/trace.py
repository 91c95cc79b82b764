"""Traces a training step to a jaxpr, with the batch as a letter or as a number."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import export

from jaxfleet.capture.builder import build
from jaxfleet.capture.finish import Interface, finish
from jaxfleet.capture.signature import Signature
from jaxfleet.capture.tidy import tidy
from jaxfleet.capture.trees import Leaf, leaf_names, spec_of
from jaxfleet.errors import CaptureError
from jaxfleet.ir import Attrs, Kind, Program, Variable
from jaxfleet.ops import jax_adapter

BATCH_LETTER = "b"


@dataclass(frozen=True)
class Traced:
    """A step that was traced once.

    Attributes:
        program: what it does.
        metrics_tree: the structure of the metrics.
        metrics: their variables, in the order of the leaves.
    """

    program: Program
    metrics_tree: Any
    metrics: tuple[str, ...]


def trace(
    step: Callable[[Any, Any], tuple[Any, Any]],
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
    out: list[Any] = []

    def flat(*leaves: Any) -> list[Any]:
        count = len(signature.state)
        unflatten = jax.tree_util.tree_unflatten
        state = unflatten(signature.state_tree, leaves[:count])
        result = step(state, unflatten(signature.batch_tree, leaves[count:]))
        out.append(_pair(result, step))
        return jax.tree_util.tree_leaves(out[-1])

    sizes = rows if rows is not None else export.symbolic_shape(BATCH_LETTER)[0]
    specs = [spec_of(leaf) for leaf in signature.state]
    specs += [spec_of(leaf, (sizes, *leaf.shape[1:])) if leaf.shape else spec_of(leaf)
              for leaf in signature.batch]  # fmt: skip
    jaxpr = jax.make_jaxpr(flat)(*specs)
    new_state, metrics = out[-1]
    variables = _variables(signature.state, specs, Kind.STATE)
    data = _variables(signature.batch, specs[len(variables) :], Kind.DATA)
    draft = tidy(build(jaxpr, [v.name for v in (*variables, *data)]), (*variables, *data))
    draft = draft.without_dead_ops()
    _check_state(new_state, signature, jaxpr)
    names = tuple(leaf_names(metrics, "metrics", bare=False))
    count = len(signature.state)
    pairs = list(zip(names, draft.results[count:], strict=True))
    interface = Interface(variables, data, draft.results[:count], pairs)
    attrs = Attrs({"batch": jax_adapter.size_of(sizes)})
    program = finish(draft, interface, name=name, attrs=attrs)
    return Traced(program, jax.tree_util.tree_structure(metrics), names)


def _pair(result: Any, step: Callable[..., Any]) -> tuple[Any, Any]:
    if isinstance(result, tuple) and len(result) == 2:
        return result
    what = f"{getattr(step, '__name__', 'the step')} returns a {type(result).__name__}"
    hint = "a training step returns (state, metrics); metrics may be an empty dict"
    raise CaptureError(f"{what}, not (state, metrics)", hint=hint)


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


def _check_state(new_state: Any, signature: Signature, jaxpr: Any) -> None:
    """Refuses a step whose state changes its structure or a leaf's type."""
    if (tree := jax.tree_util.tree_structure(new_state)) != signature.state_tree:
        raise _structure_error(new_state, tree, signature)
    for leaf, aval in zip(signature.state, jaxpr.out_avals, strict=False):
        if tuple(aval.shape) != leaf.shape or aval.dtype != leaf.dtype:
            before = f"{jax_adapter.dtype_text(leaf.dtype)}{list(leaf.shape)}"
            after = f"{jax_adapter.dtype_text(aval.dtype)}{list(aval.shape)}"
            what = f"the state leaf '{leaf.name}' goes in as {before} and comes out as {after}"
            raise CaptureError(what, hint="cast it back, or start with the type it ends with")


def _structure_error(new_state: Any, tree: Any, signature: Signature) -> CaptureError:
    before = {leaf.name for leaf in signature.state}
    after = set(leaf_names(new_state, "state", bare=True))
    gone, new = sorted(before - after)[:3], sorted(after - before)[:3]
    parts = [f"lost {', '.join(gone)}" if gone else "", f"gained {', '.join(new)}" if new else ""]
    detail = "; ".join(part for part in parts if part) or f"{signature.state_tree} became {tree}"
    what = f"the state that the step returns has another structure: {detail:.300}"
    return CaptureError(what, hint="return the state with the structure it came with")
