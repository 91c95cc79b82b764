"""The state that a step returned last: servers hold this one, and no other."""

import operator
from collections.abc import Sequence
from typing import Any

import jax

from jaxfleet.capture import Captured
from jaxfleet.errors import FeedError
from jaxfleet.runtime.feed import check_state
from jaxfleet.runtime.handles import Handle


class NewestState:
    """Tells the leaves that a step returned last from all others, by which objects they are.

    Args:
        captured: the step.

    Attributes:
        leaves: what was returned last; none before the first time.
    """

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self.leaves: list[Any] = []

    def is_made_of(self, leaves: Sequence[Any]) -> bool:
        """Tells whether these leaves, and no others, were returned last."""
        same = len(leaves) == len(self.leaves)
        return same and all(map(operator.is_, leaves, self.leaves))

    def places_of_others(self, leaves: Sequence[Any]) -> list[int]:
        """Returns the places of leaves that are not those that were returned last."""
        known = self.leaves or [None] * len(leaves)
        pairs = zip(leaves, known, strict=True)
        return [place for place, (leaf, old) in enumerate(pairs) if leaf is not old]

    def check(self, leaves: Sequence[Any], tree: Any) -> None:
        """Checks that a step can go on from a state.

        Raises:
            FeedError: it is not like the example, or has handles of another step.
        """
        known = {id(leaf) for leaf in self.leaves}
        for leaf in leaves:
            if isinstance(leaf, Handle) and id(leaf) not in known:
                what = f"{leaf!r} is of another step"
                raise FeedError(what, hint="begin with real values: pull them, or restore them")
        spec = [_stand_in(leaf) if isinstance(leaf, Handle) else leaf for leaf in leaves]
        check_state(spec, tree, self._captured)


def _stand_in(handle: Handle) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(handle.shape, handle.dtype)
