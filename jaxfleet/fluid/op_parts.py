"""What an operator is made of, as layers give it: variables or names, one or many, by slot."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from jaxfleet.errors import WrongTypeError
from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.variable import Variable

Given: TypeAlias = Variable | str | Sequence[Variable | str]
Slots: TypeAlias = Mapping[str, Given] | None


class OpParts(TypedDict, total=False):
    """What an operator is made of, besides its type.

    Attributes:
        inputs: variables or their names, one or many, by slot.
        outputs: the same.
        attrs: attributes; None for one is as if it were not there.
        stop_gradient: taken; fluid's eager mode alone used it.
    """

    inputs: Slots
    outputs: Slots
    attrs: Mapping[str, Any] | None
    stop_gradient: bool


def names_by_slot(op_type: str, given: Slots) -> dict[str, list[str]]:
    """Returns names by slot, of variables or names, one or many."""
    found = {}
    for slot, value in (given or {}).items():
        if value is None:
            continue
        many = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        for x in many:
            if not isinstance(x, str | Variable):
                what = f"'{slot}' of operator '{op_type}' is a {type(x).__name__}"
                raise mistake(what, "give a Variable, or the name of one", WrongTypeError)
        found[slot] = [x if isinstance(x, str) else x.name for x in many]
    return found
