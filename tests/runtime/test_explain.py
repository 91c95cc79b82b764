"""Numbers and text of `explain()`, however gradients reach the optimizer."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.analysis.gradient_sums import reductions, trains
from jaxfleet.ir import parse

ROWS = 16
DRAWN = np.random.default_rng(0)
BATCH = {
    "x": DRAWN.normal(size=(ROWS, 4)).astype(np.float32),
    "y": DRAWN.normal(size=(ROWS, 2)).astype(np.float32),
}
PARAMS = {"w": jnp.ones((4, 2)), "scale": jnp.ones(2), "b": jnp.zeros(1)}


def mean_loss(params: Any, batch: Any) -> Any:
    return jnp.square(batch["x"] @ params["w"] * params["scale"] + params["b"] - batch["y"]).mean()


def normalized_loss(params: Any, batch: Any) -> Any:
    h = batch["x"] @ params["w"]
    h = (h - h.mean(0)) / (h.std(0) + 1e-3)
    return jnp.square(h * params["scale"] + params["b"] - batch["y"]).mean()


def explained(tx: Any, loss: Any = mean_loss) -> str:
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    strategy = jf.DistributedStrategy(devices=4)
    return str(jf.distribute(step, (PARAMS, tx.init(PARAMS), BATCH), strategy).explain())


CLIP, SGD = optax.clip_by_global_norm(1.0), optax.sgd(0.1)


@pytest.mark.parametrize(
    ("tx", "gradients"),
    [
        (optax.chain(CLIP, jf.distributed_optimizer(SGD)), "3 all-reduces, 44 bytes"),
        (optax.MultiSteps(jf.distributed_optimizer(optax.adam(0.1)), 2), "3 all-reduces, 44 bytes"),
        # sums both the gradients and the update, which is linear
        (optax.MultiSteps(jf.distributed_optimizer(SGD), 2), "6 all-reduces, 88 bytes"),
    ],
    ids=["a chain around it", "MultiSteps around it", "MultiSteps around a linear one"],
)
def test_gradients_that_go_through_more_before_the_optimizer_are_counted(
    tx: Any, gradients: str
) -> None:
    text = explained(tx)
    assert f"gradients: {gradients} per step" in text
    assert "statistics, losses and metrics: 1 all-reduce in forward, 0 after it" in text


def test_sums_of_the_backward_pass_that_are_summed_again_are_statistics() -> None:
    inside, outside = (
        explained(jf.distributed_optimizer(optax.chain(CLIP, SGD)), normalized_loss),
        explained(optax.chain(CLIP, jf.distributed_optimizer(SGD)), normalized_loss),
    )

    def counts(text: str) -> list[str]:
        return [x for x in text.splitlines() if "gradients:" in x or "statistics," in x]

    assert "gradients: 3 all-reduces" in inside
    assert counts(inside) == counts(outside)
    assert ", 0 after it" not in inside


CLAMPED = """
program p {batch=<b>, devices=2, sharded=[["x", 0]]}
  data  x: f32[b,4]
  param w: f32[4]
  block 0
    forward
      total: f32[] = jax.reduce_sum(x) {axes=[0, 1]}
      total = c_allreduce_sum(total)
    backward
      w@GRAD: f32[4] = jax.reduce_sum(x) {axes=[0]}
      w@GRAD = c_allreduce_sum(w@GRAD)
      w@GRAD = jax.clamp(-1.0:f32, w@GRAD, 1.0:f32) for (w, w@GRAD)
    optimize
      w = jax.sub(w, w@GRAD)
      fetch(total)
"""


def test_a_pass_behind_the_sum_of_a_gradient_leaves_it_one() -> None:
    program = parse(CLAMPED)
    assert trains(program)
    assert [(x.op.reads, x.of_gradients) for x in reductions(program)] == [
        (("total",), False),
        (("w@GRAD",), True),
    ]


def test_a_metric_that_is_summed_with_a_gradient_is_not_among_its_bytes() -> None:
    both = "w@GRAD, total = c_allreduce_sum(w@GRAD, total) for (w, w@GRAD)"
    text = CLAMPED.replace("      total = c_allreduce_sum(total)\n", "")
    (found,) = reductions(parse(text.replace("w@GRAD = c_allreduce_sum(w@GRAD)", both)))
    assert [variable.name for variable in found.summed] == ["w@GRAD"]


def test_a_step_that_every_device_computes_whole_says_so_with_the_line() -> None:
    tx = jf.distributed_optimizer(SGD)

    def step(w: Any, batch: Any) -> Any:
        grads = jax.grad(lambda w: jnp.square(batch["x"][:3] @ w - batch["y"][:3]).mean())(w)
        updates, _ = tx.update(grads, tx.init(w), w)
        return optax.apply_updates(w, updates), None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about undivided steps
        made = jf.distribute(step, (PARAMS["w"], BATCH), jf.DistributedStrategy(devices=4))
    (line,) = (x for x in made.explain().splitlines() if "every device" in x)
    assert "computes the whole batch: the slice takes some rows of the batch" in line
    assert "test_explain.py:" in line
    assert "rows on each" not in made.explain()


@pytest.mark.parametrize(("is_training", "merge"), [(True, 1), (True, 2), (False, 1)])
def test_a_step_that_goes_over_all_rows_never_says_that_they_are_shared(
    is_training: bool, merge: int
) -> None:
    tx = jf.distributed_optimizer(SGD)

    def carried(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda c, row: (jnp.tanh(c + row @ w), None), jnp.zeros(2), x)[0].sum()

    def step(w: Any, batch: Any) -> Any:
        if not is_training:
            return w, carried(w, batch["x"])
        updates, _ = tx.update(jax.grad(carried)(w, batch["x"]), tx.init(w), w)
        return optax.apply_updates(w, updates), None

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        strategy = jf.DistributedStrategy(devices=4, merge=merge)
        text = jf.distribute(step, (PARAMS["w"], BATCH), strategy).explain()
    assert "every device computes the whole batch: the loop carries values" in text
    assert "rows on each" not in text
    assert any("is not divided" in str(one.message) for one in warned) == is_training
