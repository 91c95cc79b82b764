"""Lists, tuples and dicts of variables, which functions of a script take and return."""

from dataclasses import dataclass
from typing import Any

import jax

from jaxfleet.fluid.checks import check_type
from jaxfleet.fluid.variable import Variable


@dataclass(frozen=True)
class Flattened:
    """Variables, and the form in which they were.

    Attributes:
        leaves: the variables in order.
        form: what they were in.
    """

    leaves: list[Variable]
    form: Any

    def filled(self, leaves: list[Variable]) -> Any:
        """Returns other variables in the same form."""
        return jax.tree_util.tree_unflatten(self.form, leaves)


def flattened(layer: str, given: Any) -> Flattened:
    """Returns variables in order, with their form.

    Raises:
        WrongTypeError: something else is among them.
    """
    leaves, form = jax.tree_util.tree_flatten(given)
    for one in leaves:
        check_type(one, f"what {layer} works on", Variable)
    return Flattened(leaves, form)
