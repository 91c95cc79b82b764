"""Gradient markers, by which capture matches each value to its gradient.

`distributed_optimizer` names every gradient that reaches the optimizer, and every parameter passed
with it, by `jax.ad_checkpoint.checkpoint_name`: an identity that survives tracing, `jit` and
`vmap`, and compiles to nothing. Capture finds the names and removes them.
"""

import contextlib
import contextvars
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from jaxfleet.capture.signature import path_text
from jaxfleet.errors import CaptureError
from jaxfleet.ops.user_frames import line_of_caller

GRADIENT = "jaxfleet.gradient"
PARAMETER = "jaxfleet.parameter"
_LISTED = 5  # parameters listed in a hint
_numbers = itertools.count()
_INSIDE = contextvars.ContextVar("inside the update of a wrapped optimizer", default=False)


@dataclass(frozen=True)
class Mark:
    """Content of one marker."""

    kind: str  # `GRADIENT` or `PARAMETER`
    optimizer: int  # number of the wrapped optimizer, in order of creation
    leaf: int  # index of the leaf in the gradients' tree
    path: str  # its path there: `Dense_0/kernel`

    def text(self) -> str:
        return f"{self.kind}:{self.optimizer}:{self.leaf}:{self.path}"


def read_mark(name: object) -> Mark | None:
    """Parses a name; returns None unless it is a marker's."""
    text = str(name)
    if not text.startswith((f"{GRADIENT}:", f"{PARAMETER}:")):
        return None
    kind, optimizer, leaf, path = text.split(":", 3)
    return Mark(kind, int(optimizer), int(leaf), path)


def distributed_optimizer(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an Optax optimizer so that `distribute` can find its gradients.

    On one device, and outside of capture, the result is the optimizer itself. Wrap the outermost
    optimizer: `distributed_optimizer(optax.chain(...))`.

    Args:
        optimizer: any Optax transformation, or an object with the same `init` and `update`
            (`optax.MultiSteps`).

    Raises:
        CaptureError: the argument is not an optimizer; or, when `update` runs, a gradient's shape
            differs from its parameter's.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import jaxfleet as jf
        >>> import optax
        >>> tx = jf.distributed_optimizer(optax.sgd(0.5))
        >>> def train_step(w, batch):
        ...     loss, gradient = jax.value_and_grad(lambda w: jnp.mean((w - batch) ** 2))(w)
        ...     updates, _ = tx.update(gradient, tx.init(w), w)
        ...     return optax.apply_updates(w, updates), loss
        >>> train_step(jnp.zeros(2), jnp.ones((4, 2)))
        (Array([0.5, 0.5], dtype=float32), Array(1., dtype=float32))
    """
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        what = f"distributed_optimizer: {type(optimizer).__name__} is not an optimizer"
        hint = "pass an optimizer that is made, such as optax.adam(1e-3)"
        raise CaptureError(what, source=line_of_caller(), hint=hint)
    number = next(_numbers)
    takes_extra = isinstance(optimizer, optax.GradientTransformationExtraArgs | optax.MultiSteps)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if params is not None:
            params = _marked_params(updates, params, number)
        marked = _mark(updates, GRADIENT, number)
        with _updating():
            return optimizer.update(marked, state, params, **(extra if takes_extra else {}))

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


@contextlib.contextmanager
def _updating() -> Iterator[None]:
    """Rejects a wrapped optimizer inside another, which would mark each gradient twice."""
    if _INSIDE.get():
        what = "a distributed_optimizer updates inside another one"
        hint = "wrap the outermost optimizer only"
        raise CaptureError(what, source=line_of_caller(), hint=hint)
    token = _INSIDE.set(True)
    try:
        yield
    finally:
        _INSIDE.reset(token)


def _mark(tree: Any, kind: str, number: int) -> Any:
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    marked = [
        checkpoint_name(jnp.asarray(leaf), Mark(kind, number, place, path_text(path)).text())
        for place, (path, leaf) in enumerate(flat)
    ]
    return jax.tree_util.tree_unflatten(treedef, marked)


def _marked_params(gradients: Any, params: Any, number: int) -> Any:
    """Marks the parameters, or their first subtree with the gradients' structure.

    `optax.lookahead` takes a pair of parameters, fast and slow, and the gradients of the first.
    """
    structure: Callable[[Any], Any] = jax.tree_util.tree_structure
    wanted = structure(gradients)
    parts, around = jax.tree_util.tree_flatten(
        params, is_leaf=lambda part: bool(structure(part) == wanted)
    )
    places = [place for place, part in enumerate(parts) if structure(part) == wanted]
    if structure(params) == wanted or not places:
        _check_match(gradients, params)
        return _mark(params, PARAMETER, number)
    _check_match(gradients, parts[places[0]])
    parts[places[0]] = _mark(parts[places[0]], PARAMETER, number)
    return jax.tree_util.tree_unflatten(around, parts)


def _check_match(gradients: Any, params: Any) -> None:
    found = dict(jax.tree_util.tree_flatten_with_path(gradients)[0])
    wanted = dict(jax.tree_util.tree_flatten_with_path(params)[0])
    for path, gradient in found.items():
        param = wanted.get(path)
        if param is None:
            what = f"the gradient '{path_text(path)}' has no parameter of that name"
            known = ", ".join(sorted(path_text(path) for path in wanted)[:_LISTED])
            hint = f"differentiate with respect to the parameters that update gets: {known}"
            raise CaptureError(what, source=line_of_caller(), hint=hint)
        # Per-example gradients, with a leading axis, are for optimizers that clip them: DP-SGD.
        if jnp.shape(param) not in {jnp.shape(gradient), jnp.shape(gradient)[1:]}:
            what = (
                f"the gradient of '{path_text(path)}' is {list(jnp.shape(gradient))}, "
                f"but the parameter is {list(jnp.shape(param))}"
            )
            hint = "give update the gradients as they come, and the parameters they belong to"
            raise CaptureError(what, source=line_of_caller(), hint=hint)
