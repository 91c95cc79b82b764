"""Products whose output is transposed for their readers, and those that must stay unchanged."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxfleet as jf
from jaxfleet.ir import parse
from jaxfleet.passes import TurnProducts
from jaxfleet.testing import check_pass

HEAD = """program p {batch=<b>}
  data  x: f32[b,3]
  data  y: f32[b,4]
  param w: f32[3,4]
  param v: f32[4,3]
  block 0
    backward
      turned: f32[4,3] = jax.dot_general(y, x) {dimension_numbers=[[[0], [0]], [[], []]]}
"""


def test_a_product_that_something_else_reads_too_is_left_as_it_is() -> None:
    rest = """      w@GRAD: f32[3,4] = jax.transpose(turned) {permutation=[1, 0]}
    optimize
      w = jax.sub(w, w@GRAD)
      v = jax.sub(v, turned)
"""
    check_pass(TurnProducts(), before=HEAD + rest, after=HEAD + rest)


def test_a_product_that_is_turned_twice_is_left_as_it_was() -> None:
    rest = """      once: f32[3,4] = jax.transpose(turned) {permutation=[1, 0]}
      twice: f32[4,3] = jax.transpose(once) {permutation=[1, 0]}
    optimize
      v = jax.sub(v, twice)
"""
    after = HEAD.replace("turned", "twice") + "    optimize\n      v = jax.sub(v, twice)\n"
    check_pass(TurnProducts(), before=HEAD + rest, after=after)


def test_a_transpose_into_a_parameter_stays_where_it_is() -> None:
    rest = """    optimize
      old: f32[3,4] = jax.copy(w)
      w = jax.transpose(turned) {permutation=[1, 0]}
      v = jax.transpose(old) {permutation=[1, 0]}
"""
    check_pass(TurnProducts(), before=HEAD + rest, after=HEAD + rest)


PAIRED = """program p
  data  x: f32[2,3,5]
  data  y: f32[2,5,4,6]
  param w: {shape}
  block 0
    forward
      made: f32[2,3,4,6] = jax.dot_general(x, y) {{dimension_numbers=[[[2], [1]], [[0], [0]]]}}
      read: {shape} = jax.transpose(made) {{permutation={permutation}}}
      w = jax.add(w, read)
"""


@pytest.mark.parametrize(
    ("permutation", "shape", "is_turned"),
    [((0, 2, 3, 1), "f32[2,4,6,3]", True), ((0, 3, 2, 1), "f32[2,6,4,3]", False)],
)
def test_paired_axes_stay_in_front_and_free_ones_change_sides_in_their_order(
    permutation: tuple[int, ...], shape: str, is_turned: bool
) -> None:
    program = parse(PAIRED.format(shape=shape, permutation=list(permutation)))
    types = [op.type for op in TurnProducts().run(program).root.ops]
    assert ("jax.transpose" not in types) == is_turned


def test_a_step_on_devices_transposes_no_gradient_of_a_weight() -> None:
    """XLA would merge such a transpose into a product without a fast kernel."""
    tx: Any = jf.distributed_optimizer(optax.sgd(0.1))

    def layer(h: Any, w: Any) -> Any:
        return jnp.tanh(h @ w), None

    def loss(params: Any, batch: Any) -> jax.Array:
        h, _ = lax.scan(layer, batch @ params["in"], params["layers"])
        return jnp.square(h @ params["out"]).mean()

    def train_step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state[0], batch)
        updates, opt = tx.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt), value

    shapes = {"in": (6, 4), "layers": (3, 4, 4), "out": (4, 5)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    batch = np.ones((8, 3, 6), np.float32)
    step: Any = jf.distribute(
        train_step, ((params, tx.init(params)), batch), jf.DistributedStrategy(devices=4)
    )
    ops = [op for block in step.program.blocks for op in block.ops]
    products = {op.writes[0] for op in ops if op.type == "jax.dot_general"}
    assert len(products) >= 8  # three forward, five backward
    assert not [op for op in ops if op.type == "jax.transpose" and op.reads[0] in products]
