"""Gradient operators with their own computation match `jax.vjp`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ops.fluid.computed import by_slot, schema

RANDOM = np.random.default_rng(0)
PROBABILITIES = np.asarray(jax.nn.softmax(RANDOM.normal(size=(6, 5)), axis=-1), np.float32)
LABELS = np.asarray([[0], [4], [2], [2], [1], [-100]], np.int32)
POSITIVE = RANDOM.uniform(0.5, 2.0, (6, 5)).astype(np.float32)
ANY = RANDOM.normal(size=(6, 5)).astype(np.float32)
IMAGES = RANDOM.normal(size=(2, 5, 3, 3)).astype(np.float32)

CASES: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("relu", [ANY], {}),
    ("tanh", [ANY], {}),
    ("sigmoid", [ANY], {}),
    ("exp", [ANY], {}),
    ("sqrt", [POSITIVE], {}),
    ("rsqrt", [POSITIVE], {}),
    ("reciprocal", [POSITIVE], {}),
    ("relu6", [ANY], {"threshold": 0.5}),
    ("hard_sigmoid", [ANY], {"slope": 0.7}),
    ("soft_relu", [ANY], {"threshold": 1.0}),
    ("softmax", [ANY], {"axis": -1}),
    ("softmax", [ANY], {"axis": 0}),
    ("cross_entropy2", [PROBABILITIES, LABELS], {}),
    ("softmax_with_cross_entropy", [ANY, LABELS], {}),
    ("softmax_with_cross_entropy", [ANY, LABELS[:5].T], {"axis": 0}),
    ("softmax_with_cross_entropy", [ANY, PROBABILITIES * 2], {"soft_label": True}),
    ("reduce_max", [ANY], {"dim": [1]}),
    ("reduce_min", [ANY], {"dim": [-2], "keep_dim": True}),
    ("reduce_max", [ANY], {"reduce_all": True}),
    ("reshape2", [ANY], {"shape": [3, 10]}),
    ("transpose2", [ANY], {"axis": [1, 0]}),
    ("unsqueeze2", [ANY], {"axes": [1]}),
    ("squeeze2", [ANY[:, None]], {"axes": [1]}),
    ("flatten2", [IMAGES], {"axis": 2}),
    ("pad", [ANY], {"paddings": [0, 1, 2, 0]}),
    ("floor", [ANY], {}),
    ("huber_loss", [ANY, POSITIVE], {"delta": 0.5}),
    ("label_smooth", [POSITIVE, None], {"epsilon": 0.2}),
    ("stack", [[ANY, POSITIVE]], {"axis": 1}),
    ("unstack", [ANY], {"axis": 1, "num": 5}),
]


@pytest.mark.few(15)
@pytest.mark.parametrize(("op_type", "values", "given"), CASES)
def test_a_gradient_is_that_of_what_is_computed(
    op_type: str, values: list[Any], given: dict[str, Any]
) -> None:
    found = schema(op_type)
    gradient = found.gradient
    assert gradient is not None
    assert gradient.compute is not None
    attrs = {**found.attrs, **given}
    name = gradient.writes[0]
    inputs = dict(zip((slot.name for slot in found.inputs), values, strict=True))
    main = found.outputs[-1 if op_type.startswith("softmax_with") else 0].name
    shapes = jax.eval_shape(lambda x: by_slot(op_type, given, {**inputs, name: x}), inputs[name])
    grads = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes)
    draw = lambda x: RANDOM.normal(size=x.shape).astype(np.float32)  # noqa: E731
    grads[main] = jax.tree.map(draw, grads[main])

    def both(value: Any) -> tuple[Any, Any]:
        assert gradient is not None
        assert gradient.compute is not None
        made, pull = jax.vjp(lambda x: by_slot(op_type, given, {**inputs, name: x}), value)
        (wanted,) = pull(jax.tree.map(lambda x, g: jnp.asarray(g, x.dtype), made, grads))
        reads = {slot: {**inputs, **made}[slot] for slot in gradient.reads}
        return gradient.compute(attrs, reads, grads)[name], wanted

    own, wanted = jax.jit(both)(jax.tree.map(jnp.asarray, inputs[name]))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), own, wanted)
