"""Arguments that a step changes in place: models, optimizers and metrics of flax's nnx.

`train_step(model, optimizer, batch)` under `nnx.jit` returns the loss alone, and the objects of the
caller hold the new values afterwards. Such objects are pytrees: a trace gives the step copies.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxfleet.capture.signature import is_iterator, path_text
from jaxfleet.errors import CaptureError
from jaxfleet.ops.user_frames import line_of_caller


class Watched:
    """A step that records which of its nnx arguments it changed in its last call.

    Attributes:
        changed: the places of these arguments.
        beside: the places of those in which it replaced an array that is not an object's.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        functools.update_wrapper(self, step)
        self.step = step
        self.changed: tuple[int, ...] = ()
        self.beside: tuple[int, ...] = ()

    def __call__(self, *args: Any) -> Any:
        before = [(_flat(value), _flat(_others(value))) for value in args]
        returned = self.step(*args)
        after = [(_flat(value), _flat(_others(value))) for value in args]
        changed, beside = (
            tuple(
                place
                for place, value in enumerate(args)
                if _objects(value) and not _are_same(before[place][part], after[place][part])
            )
            for part in range(2)
        )
        self.changed, self.beside = changed, beside
        return returned


def has_objects(values: Sequence[Any]) -> bool:
    """Whether there is an nnx object among the values of a call."""
    return any(_objects(value) for value in values)


def generator_in(value: Any, name: str) -> str | None:
    """Returns the path of the first `nnx.Rngs` or stream of one in a value, None if there is none.

    One inside another object, such as a Dropout's, does not count.
    """
    nnx = sys.modules.get("flax.nnx")
    for path, one in jax.tree_util.tree_flatten_with_path(value, is_leaf=_is_whole)[0]:
        if nnx is not None and isinstance(one, nnx.Rngs | nnx.RngStream):
            return f"{name}/{path_text(path)}" if path else name
    return None


def is_generator(value: Any) -> bool:
    """Whether a value contains generators and nothing else."""
    alone = [generator_in(one, "") for one in _objects(value)]
    return bool(alone) and None not in alone and not _others(value)


def check_shared(names: Sequence[str], values: Sequence[Any]) -> None:
    """Rejects a Variable that is at two places, as a pytree has a copy of it at each.

    Raises:
        CaptureError: there is one; the error names both places.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    known: dict[int, str] = {}
    for name, value in zip(names, values, strict=True):
        if not _objects(value):
            continue
        variables = jax.tree_util.tree_flatten_with_path(value, is_leaf=_is_variable)[0]
        for path, variable in variables:
            here = f"{name}/{path_text(path)}" if path else name
            other = known.setdefault(id(variable), here)
            if other != here and isinstance(variable, nnx.Variable):
                what = f"'{here}' and '{other}' are one Variable"
                hint = (
                    "a step gets a copy of each object: keep a Variable in one place, and pass it "
                    "to where it is used, or split the objects by nnx.split and merge them in the "
                    "step"
                )
                raise CaptureError(what, source=line_of_caller(), hint=hint)


def update_in_place(value: Any, new: Any) -> None:
    """Gives the nnx objects in a value the Variables' values of those in another."""
    nnx = sys.modules["flax.nnx"]
    for old, changed in zip(_objects(value), _objects(new), strict=True):
        nnx.update(old, nnx.state(changed))


def _objects(value: Any) -> list[Any]:
    """Returns the outermost nnx objects in a value."""
    return [x for x in jax.tree_util.tree_leaves(value, is_leaf=_is_whole) if _is_object(x)]


def _others(value: Any) -> list[Any]:
    """Returns the leaves of a value that are not in an nnx object."""
    return [x for x in jax.tree_util.tree_leaves(value, is_leaf=_is_whole) if not _is_object(x)]


def _is_whole(value: Any) -> bool:
    """Whether a value is a leaf here: an nnx object, or an iterator, which jax warns of."""
    return _is_object(value) or is_iterator(value)


def _is_object(value: Any) -> bool:
    """Whether a value is an nnx object; not before nnx is imported, or if they are no pytrees."""
    kind = getattr(sys.modules.get("flax.nnx"), "Pytree", None)
    return kind is not None and isinstance(value, kind)


def _is_variable(value: Any) -> bool:
    return is_iterator(value) or isinstance(value, sys.modules["flax.nnx"].Variable)


def _flat(value: Any) -> tuple[list[Any], Any]:
    return jax.tree_util.tree_flatten(value)


def _are_same(before: tuple[list[Any], Any], after: tuple[list[Any], Any]) -> bool:
    return before[1] == after[1] and all(x is y for x, y in zip(before[0], after[0], strict=True))
