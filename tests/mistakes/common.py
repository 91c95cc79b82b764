"""Common parts of the catalogue of mistakes: a correct step, and the check of an error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.ops.user_frames import line_of_error

ROWS = 8
State = dict[str, Any]
Batch = Any
Step = Callable[[State, Batch], Any]


def params() -> dict[str, jax.Array]:
    return {"b": jnp.zeros(2), "w": jnp.ones((4, 2))}


def batch(rows: int = ROWS) -> dict[str, Any]:
    return {"x": np.ones((rows, 4), np.float32), "y": np.ones((rows, 2), np.float32)}


def loss(params: Any, batch: Any) -> jax.Array:
    return jnp.square(batch["x"] @ params["w"] + params["b"] - batch["y"]).mean()


def wrapped() -> optax.GradientTransformationExtraArgs:
    return jf.distributed_optimizer(optax.sgd(0.1))


def training(tx: Any) -> tuple[Step, State]:
    def step(state: State, batch: Batch) -> tuple[State, dict[str, Any]]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {**state, "params": params, "opt_state": opt_state}, {"loss": value}

    return step, {"params": params(), "opt_state": tx.init(params())}


@contextmanager
def refused(kind: type[Exception], *, cause: str, line: str, hint: str) -> Iterator[None]:
    """Fails unless an error of this kind is raised, with its cause, line and hint.

    Args:
        kind: the error's class.
        cause: a part of its message.
        line: a part of the user's line, in its notes or the last of the user's in its traceback.
        hint: a part of its hint.
    """
    with pytest.raises(kind) as caught:
        yield
    error = caught.value
    notes = getattr(error, "__notes__", [])
    assert cause in str(error)
    assert any("hint: " in note and hint in note for note in notes), notes
    place = line_of_error(error)
    assert any(line in note for note in notes) or (place and line in place.where()), notes
