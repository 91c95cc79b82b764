"""Calls of a one-device step on the user's state as it is, which jit flattens and checks."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxfleet.ops.basic import failed_check
from jaxfleet.runtime.compiled_variants import Variant
from jaxfleet.runtime.step_inputs import buffer_of, is_deleted, looks_for_nans

_GIVEN_TWICE = ("Attempt to donate the same buffer", "previously donated in the same call")


@dataclass
class Call:
    """What runs the calls with batches of one structure.

    XLA rejects a deleted array, and a buffer in two places, but it also writes a line of its own to
    standard error each time. So a state that the step did not return last is examined first. The
    one that it did return has live arrays with a buffer each, unless the script changed it.
    """

    variant: Variant  # the compiled step
    executable: Any = None  # takes the user's state as it is; None before the first call
    # The kinds of states that XLA found to share a buffer, with themselves or with the batch: those
    # that the step returned last, and others. Before, only arrays given twice are looked for.
    sharing: set[bool] = field(default_factory=set)

    def on_accepted(self, state: Any, data: list[Any], *, is_returned: bool) -> Any:
        """Returns the executable's results, or None if it does not accept the state.

        It raises before it runs, and takes no memory then, if the structure or a type differs, an
        array is deleted, traced or on another device, or one buffer is given twice.

        Args:
            state: the user's.
            data: the leaves of the batch.
            is_returned: whether the step returned this state last.
        """
        if self.executable is None or looks_for_nans():
            return None
        looks_at_buffers = is_returned in self.sharing
        if not is_returned or looks_at_buffers:
            leaves = jax.tree_util.tree_leaves(state)
            takes_memory = bool(self.variant.lowered.shares.given)
            if takes_memory and not _is_usable(leaves, data if looks_at_buffers else None):
                return None
        try:
            return self.executable(state, [], data)
        except (TypeError, ValueError):
            return None
        except RuntimeError as error:
            if (failed := failed_check(error)) is not None:
                raise failed from error
            message = str(error)
            if any(text in message for text in _GIVEN_TWICE):
                self.sharing.add(is_returned)
            elif "deleted" not in message:
                raise
            return None


def _is_usable(leaves: Sequence[Any], data: Sequence[Any] | None) -> bool:
    """Whether no leaf is deleted or given twice and, with a batch, no two arrays share a buffer."""
    try:
        deleted = any(map(operator.methodcaller("is_deleted"), leaves))
    except (AttributeError, TypeError):  # a number, an array of numpy, or a tracer
        deleted = any(map(is_deleted, leaves))
    if deleted or len(set(map(id, leaves))) < len(leaves):
        return False
    if data is None:
        return True
    arrays = [x for x in (*leaves, *data) if _has_buffer(x)]
    return len(set(map(buffer_of, arrays))) == len(arrays)


def _has_buffer(value: Any) -> bool:
    is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return is_array and value.size > 0
