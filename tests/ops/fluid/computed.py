"""Outputs of fluid's operators, by slot."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxfleet.ops.fluid.schema import Schema, schema_of

Case = tuple[str, Mapping[str, Any], Mapping[str, Any]]  # operator, attributes, inputs by slot


def schema(op_type: str) -> Schema:
    found = schema_of(op_type)
    assert found is not None, op_type
    assert found.compute is not None, op_type
    return found


def computed(op_type: str, attrs: Mapping[str, Any] | None = None, **inputs: Any) -> dict[str, Any]:
    """Returns an operator's outputs by slot."""
    (made,) = all_computed([(op_type, attrs or {}, inputs)])
    return made


def all_computed(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Returns the outputs of many operators, compiled as one for speed."""

    def run(values: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [
            by_slot(op, attrs, given) for (op, attrs, _), given in zip(cases, values, strict=True)
        ]

    made = jax.jit(run)([dict(inputs) for _, _, inputs in cases])
    found: list[dict[str, Any]] = jax.tree.map(np.asarray, made)
    return found


def by_slot(op_type: str, attrs: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Calls an operator's computation, with its default attributes."""
    found = schema(op_type)
    slots = [slot.name for slot in found.inputs]
    assert set(inputs) <= set(slots), f"{op_type} has {slots}"
    assert found.compute is not None
    made = found.compute({**found.attrs, **attrs}, *(inputs.get(name) for name in slots))
    names = [slot.name for slot in found.outputs]
    return dict(zip(names, made, strict=True)) if len(names) > 1 else {names[0]: made}
