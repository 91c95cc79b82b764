"""Layer functions: `one_operator` derives the body from the signature, `checked` checks arguments.

::

    @one_operator("softmax", X="input")
    def softmax(input: Variable, use_cudnn: bool = False, name: str | None = None) -> Variable:
        "Normalizes along an axis to positive values of sum 1."

A slot takes a variable or a list of variables; `name` and `act` have their usual meaning; every
other argument is the operator's attribute of the same name.
"""

import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

from jaxfleet.errors import WrongTypeError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.framework.types import dtype_name
from jaxfleet.fluid.framework.variable import Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.ops.fluid import schema_of

P = ParamSpec("P")
R = TypeVar("R")
Kinds: TypeAlias = tuple[type, ...]

_AS_GIVEN: Mapping[Any, type] = {int: numbers.Integral, float: numbers.Real}  # numpy scalars too


def checked(layer: Callable[P, R]) -> Callable[P, R]:
    """Makes a layer report the line of a script that calls it with invalid arguments.

    Arguments whose annotation contains `Variable` are checked against it; the layer itself checks
    the others. A missing, unknown or mistyped argument raises WrongTypeError.
    """
    signature = inspect.signature(layer)
    hints = typing.get_type_hints(layer)
    kinds = {name: found for name in signature.parameters if (found := _kinds(hints.get(name)))}
    name = layer.__name__

    @functools.wraps(layer)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            hint = f"its arguments are {', '.join(signature.parameters)}"
            raise mistake(f"{name}: {error}", hint, WrongTypeError) from None
        for argument, wanted in kinds.items():
            if argument in given:
                _check(f"'{argument}' of {name}", given[argument], wanted)
        return layer(*args, **kwargs)

    return call


def _check(what: str, value: Any, kinds: Kinds) -> None:
    if list in kinds and isinstance(value, list | tuple):
        for one in value:
            _check(what, one, kinds)
    else:
        check_type(value, what, kinds)


def _kinds(hint: Any) -> Kinds:
    """Types that an annotation containing Variable allows; empty for any other annotation.

    A list stands for a sequence of the other types.
    """
    parts = typing.get_args(hint) if _is_union(hint) else (hint,)
    found: set[type] = set()
    for part in parts:
        if typing.get_origin(part) is Sequence:
            inner = typing.get_args(part)[0]
            found |= {list, *(typing.get_args(inner) if _is_union(inner) else (inner,))}
        elif isinstance(part, type):
            found.add(part)
        else:
            return ()  # Any, or unchecked
    if Variable not in found or not all(isinstance(kind, type) for kind in found):
        return ()
    return tuple(_AS_GIVEN.get(kind, kind) for kind in sorted(found, key=_rank))


def _rank(kind: type) -> tuple[bool, str]:
    return kind is not Variable, kind.__name__


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in {typing.Union, types.UnionType}


Layer = Callable[P, Variable]


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
    """Gives the decorated signature its body, which adds one operator.

    Args:
        op_type: the operator's type.
        out: slot of the layer's result.
        into: argument with a variable to write instead of a new one.
        dtype: of the result; the first input's unless given.
        typed: argument with the dtype of the result.
        aside: dtypes by slot of the other outputs, which are not differentiated; empty for the
            first input's.
        frozen: gradients stop at the results.
        renamed: attribute names by argument, where they differ.
        unused: hints without effect here.
        refused: unsupported arguments, which must be None or omitted.
        layer_type: prefix of the variables' names, if it is not `op_type`.
        **slots: the argument of each slot.
    """
    written, spelled = dict(aside or {}), dict(renamed or {})
    taken = {*slots.values(), *unused, *refused, into, "name", "act"}

    def add(given: Mapping[str, Any]) -> Variable:
        """Adds the operator for a call's arguments; returns its result."""
        for name in refused:
            if given[name] is not None:
                what = f"{op_type}: '{name}' is given, and shapes are known before a run"
                raise mistake(what, "leave it out; the batch's axis is -1 or 0 in the shape")
        inputs = {
            slot: variables(op_type, argument, given[argument])
            for slot, argument in slots.items()
            if given[argument] is not None or not _may_be_empty(op_type, slot)
        }
        first = next(iter(inputs.values()))[0].dtype
        attrs = {spelled.get(k, k): value for k, value in given.items() if k not in taken}
        if typed:
            attrs[typed] = dtype_name(attrs[typed])
        outputs = {slot: like or first for slot, like in written.items()}
        outputs = {out: given.get(into) or attrs.get(typed) or dtype or first, **outputs}
        helper = LayerHelper(layer_type or op_type, given.get("name"))
        declared = as_declared(op_type, attrs)
        made, *_ = helper.add(inputs, outputs, declared, op_type=op_type, frozen=frozen)
        return helper.with_activation(made, given.get("act"))

    def decorate(signature_only: Layer[P]) -> Layer[P]:
        signature = inspect.signature(signature_only)

        @functools.wraps(signature_only)
        def layer(*args: P.args, **kwargs: P.kwargs) -> Variable:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return add(bound.arguments)

        return layer

    return decorate


def variables(layer: str, argument: str, given: Any) -> list[Variable]:
    """The argument as a list, which must not be empty."""
    many = list(given) if isinstance(given, list | tuple) else [given]
    if not many:
        raise mistake(f"'{argument}' of {layer} is an empty list", "give it at least one variable")
    for one in many:
        check_type(one, f"'{argument}' of {layer}", Variable)
    return many


def as_declared(op_type: str, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Converts attributes to the declared types: 2 to 2.0 or [2]."""
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
