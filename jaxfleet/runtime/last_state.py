"""Knows the state that a step returned last again, and keeps none of it."""

import operator
from collections.abc import Sequence
from typing import Any
from weakref import ref


class LastState:
    """The leaves of a state, which live no longer for being known here.

    They are known as the objects that they are: a number like `id` would be another's as soon as
    they are gone, and a new array does get the place of an old one.

    Args:
        leaves: they; jax's arrays, or handles.
    """

    def __init__(self, leaves: Sequence[Any] = ()) -> None:
        self._leaves = list(map(ref, leaves))

    def is_made_of(self, leaves: Sequence[Any]) -> bool:
        """Tells whether it is these leaves, in this order."""
        same = len(leaves) == len(self._leaves)
        return same and all(map(operator.is_, map(operator.call, self._leaves), leaves))

    def __contains__(self, value: object) -> bool:
        return any(leaf() is value for leaf in self._leaves)
