"""A job with compressed gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import PassError
from jaxfleet.passes import CompressSends

RANDOM = np.random.default_rng(0)
tx = jf.distributed_optimizer(optax.sgd(0.5))


def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    def loss_of(w: jax.Array) -> jax.Array:
        return ((batch["x"] @ w - batch["y"]) ** 2).mean()

    loss, grad = jax.value_and_grad(loss_of)(state["w"])
    updates, opt = tx.update(grad, state["opt"], state["w"])
    return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, loss


def job() -> tuple[Any, list[Any], np.ndarray]:
    truth = RANDOM.normal(size=(32, 4)).astype(np.float32)
    rows = [RANDOM.normal(size=(16, 32)).astype(np.float32) for _ in range(60)]
    w = jnp.zeros((32, 4))
    return {"w": w, "opt": tx.init(w)}, [{"x": x, "y": x @ truth} for x in rows], truth


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("passes", "share", "error"),
    [
        ("", 1.0, 0.02),
        ("compress_sends{method=fp16,min_elements=1}", 0.5, 0.02),
        ("compress_sends{method=int8,min_elements=1}", 0.33, 0.02),
        ("compress_sends{method=topk,ratio=0.25,min_elements=1}", 0.55, 0.3),  # each waits its turn
    ],
)
def test_it_learns_and_sends_so_much_less(passes: str, share: float, error: float) -> None:
    state, batches, truth = job()
    strategy = jf.DistributedStrategy(mode="pserver", passes=passes, min_block_size=16)
    twin = jf.Twin(train_step, (state, batches[0]), strategy, servers=2, trainers=2)
    sent = {}

    def script(step: Any) -> tuple[Any, tuple[Any, ...]]:
        now = state
        for number, batch in enumerate(batches):
            before = step.client.sent_bytes
            now, _ = step(now, batch)
            sent[number] = step.client.sent_bytes - before
        return step.pull(now), ()

    found = twin.play(script).states[0]["w"]
    assert np.abs(np.asarray(found) - truth).max() < error
    assert sent[len(batches) - 1] <= share * 4 * 32 * 4 + 4  # and the loss
    assert ("compress=" in str(twin.programs().trainer)) == bool(passes)


def test_an_option_that_is_none_is_refused() -> None:
    with pytest.raises(PassError, match="method is 'zip'"):
        CompressSends(method="zip")
    with pytest.raises(PassError, match="ratio is 0"):
        CompressSends(method="topk", ratio=0.0)
