"""Layers that are one operator: what a layer's signature says is not said again in its body.

::

    @one_operator("softmax", X="input")
    def softmax(input: Variable, use_cudnn: bool = False, name: str | None = None) -> Variable:
        "Makes what is along an axis positive, with sum 1."

An argument that is in a slot is a variable, or a list of them; `name` and `act` mean what they
mean everywhere; every other one is the operator's attribute of the same name.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec

from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.dtypes import dtype_name
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.variable import Variable
from jaxfleet.ops.fluid import schema_of

P = ParamSpec("P")
Layer = Callable[P, Variable]
_OF_EVERY_LAYER = ("name", "act")


def one_operator(
    op_type: str,
    *,
    out: str = "Out",
    into: str = "",
    dtype: str | None = None,
    typed: str = "",
    aside: Mapping[str, str] | None = None,
    frozen: bool = False,
    renamed: Mapping[str, str] | None = None,
    unused: Sequence[str] = (),
    refused: Sequence[str] = (),
    layer_type: str | None = None,
    **slots: str,
) -> Callable[[Layer[P]], Layer[P]]:
    """Gives the decorated signature its body.

    Args:
        op_type: the operator's type.
        out: the slot of what the layer returns.
        into: the argument that may name a variable to write, in the place of a new one.
        dtype: of the result; that of the first input unless given.
        typed: the argument that names the dtype of the result.
        aside: dtypes of the other outputs by slot, which nothing differentiates; empty for that
            of the first input.
        frozen: gradients end at what is made.
        renamed: attributes by argument, where they are called otherwise.
        unused: hints, which change nothing here.
        refused: arguments that cannot act here, and are None or left out.
        layer_type: what the layer's variables are named for, where that is not `op_type`.
        **slots: the argument that each slot takes.
    """
    made = (out, into, dtype, typed, aside or {}, frozen)
    one = _OneOperator(op_type, slots, *made, renamed or {}, unused, refused, layer_type)

    def decorate(signature_only: Layer[P]) -> Layer[P]:
        signature = inspect.signature(signature_only)

        @functools.wraps(signature_only)
        def layer(*args: P.args, **kwargs: P.kwargs) -> Variable:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return one.add(bound.arguments)

        return layer

    return decorate


@dataclass(frozen=True)
class _OneOperator:
    """What a signature does not say of its operator; the fields are arguments of `one_operator`."""

    op_type: str
    slots: Mapping[str, str]
    out: str
    into: str
    dtype: str | None
    typed: str
    aside: Mapping[str, str]
    frozen: bool
    renamed: Mapping[str, str]
    unused: Sequence[str]
    refused: Sequence[str]
    layer_type: str | None

    def add(self, given: Mapping[str, Any]) -> Variable:
        """Adds the operator for the arguments of a call; returns what it makes."""
        for name in self.refused:
            if given[name] is not None:
                what = f"{self.op_type}: '{name}' is given, and shapes are known before a run"
                raise mistake(what, "leave it out; the batch's axis is -1 or 0 in the shape")
        inputs = {
            slot: variables(self.op_type, argument, given[argument])
            for slot, argument in self.slots.items()
            if given[argument] is not None or not _may_be_empty(self.op_type, slot)
        }
        helper = LayerHelper(self.layer_type or self.op_type, given.get("name"))
        made, *_ = helper.add(
            inputs,
            self._outputs(given, next(iter(inputs.values()))[0].dtype),
            self._attrs(given),
            op_type=self.op_type,
            frozen=self.frozen,
        )
        return helper.with_activation(made, given.get("act"))

    def _outputs(self, given: Mapping[str, Any], first: str) -> dict[str, str | Variable]:
        """Returns variables to write, or dtypes of new ones; `first` is that of the first input."""
        dtype = dtype_name(given[self.typed]) if self.typed else self.dtype or first
        aside = {slot: like or first for slot, like in self.aside.items()}
        return {self.out: given.get(self.into) or dtype, **aside}

    def _attrs(self, given: Mapping[str, Any]) -> dict[str, Any]:
        unread = {*self.unused, *self.refused}
        taken = {*self.slots.values(), *unread, self.into, *_OF_EVERY_LAYER}
        attrs = {self.renamed.get(k, k): value for k, value in given.items() if k not in taken}
        if self.typed:
            attrs[self.typed] = dtype_name(attrs[self.typed])
        return as_declared(self.op_type, attrs)


def variables(layer: str, argument: str, given: Any) -> list[Variable]:
    """Returns what a layer is given as a list.

    Raises:
        TypeError: it is no Variable, and no list of them.
        ProgramError: the list is empty.
    """
    many = list(given) if isinstance(given, list | tuple) else [given]
    if not many:
        raise mistake(f"'{argument}' of {layer} is an empty list", "give it at least one variable")
    for one in many:
        check_type(one, f"'{argument}' of {layer}", Variable)
    return many


def as_declared(op_type: str, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns attributes as the operator declares them: 2 is 2.0, and [2], where it has such."""
    schema = schema_of(op_type)
    declared = {} if schema is None else schema.attrs
    return {name: _like(declared.get(name), value) for name, value in attrs.items()}


def _like(declared: Any, value: Any) -> Any:
    if value is None or isinstance(declared, bool):
        return value
    if isinstance(declared, float):
        return float(value)
    if isinstance(declared, list):
        return list(value) if isinstance(value, Sequence) else [value]
    return value


def _may_be_empty(op_type: str, slot: str) -> bool:
    schema = schema_of(op_type)
    return schema is not None and any(s.name == slot and s.optional for s in schema.inputs)
