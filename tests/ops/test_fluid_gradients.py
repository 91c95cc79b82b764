"""Gradient operators that say themselves what they compute say what `jax.vjp` would."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfleet.ops.fluid.schema import Schema, schema_of

RANDOM = np.random.default_rng(0)
PROBABILITIES = np.asarray(jax.nn.softmax(RANDOM.normal(size=(6, 5)), axis=-1), np.float32)
LABELS = np.asarray([[0], [4], [2], [2], [1], [-100]], np.int32)
POSITIVE = RANDOM.uniform(0.5, 2.0, (6, 5)).astype(np.float32)
ANY = RANDOM.normal(size=(6, 5)).astype(np.float32)

CASES: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("relu", [ANY], {}),
    ("tanh", [ANY], {}),
    ("sigmoid", [ANY], {}),
    ("exp", [ANY], {}),
    ("sqrt", [POSITIVE], {}),
    ("reciprocal", [POSITIVE], {}),
    ("softmax", [ANY], {"axis": -1}),
    ("softmax", [ANY], {"axis": 0}),
    ("cross_entropy2", [PROBABILITIES, LABELS], {}),
    ("softmax_with_cross_entropy", [ANY, LABELS], {}),
    ("softmax_with_cross_entropy", [ANY, PROBABILITIES * 2], {"soft_label": True}),
    ("reshape2", [ANY], {"shape": [3, 10]}),
    ("transpose2", [ANY], {"axis": [1, 0]}),
    ("unsqueeze2", [ANY], {"axes": [1]}),
    ("split", [ANY], {"num": 3, "axis": 0}),
    ("split", [ANY], {"sections": [1, 4], "axis": 1}),
]


def made_by(schema: Schema, attrs: dict[str, Any], values: list[Any]) -> dict[str, Any]:
    assert schema.compute is not None
    made = schema.compute(attrs, *values)
    outputs = [slot.name for slot in schema.outputs]
    return dict(zip(outputs, made, strict=True)) if len(outputs) > 1 else {outputs[0]: made}


@pytest.mark.parametrize(("op_type", "values", "given"), CASES)
def test_a_gradient_is_that_of_what_is_computed(
    op_type: str, values: list[Any], given: dict[str, Any]
) -> None:
    schema = schema_of(op_type)
    assert schema is not None
    assert schema.gradient is not None
    assert schema.gradient.compute is not None
    attrs = {**schema.attrs, **given}
    (name,) = schema.gradient.writes
    at = [slot.name for slot in schema.inputs].index(name)

    def run(x: jax.Array) -> dict[str, Any]:
        return made_by(schema, attrs, [*values[:at], x, *values[at + 1 :]])

    made, pull = jax.vjp(run, jnp.asarray(values[at]))
    main = schema.outputs[-1].name if op_type.startswith("softmax_with") else schema.outputs[0].name
    grads = {k: jax.tree.map(jnp.zeros_like, v) for k, v in made.items()}
    grads[main] = jax.tree.map(lambda x: RANDOM.normal(size=x.shape).astype(np.float32), made[main])
    (wanted,) = pull(grads)
    inputs = dict(zip((slot.name for slot in schema.inputs), values, strict=True))
    reads = {slot: {**inputs, **made}[slot] for slot in schema.gradient.reads}
    found = schema.gradient.compute(attrs, reads, grads)[name]
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6)
