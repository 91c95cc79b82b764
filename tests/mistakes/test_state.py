"""Mistakes with the state: its content, and its returned form."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfleet as jf
from jaxfleet.errors import CaptureError
from tests.mistakes.common import Batch, State, batch, refused, training, wrapped


@pytest.mark.parametrize(
    ("thing", "kind"),
    [
        ("adam", "type str"),
        (jnp.tanh, "type PjitFunction"),
        (object(), "type object"),
        (np.array([1, None], dtype=object), "dtype object"),
        (np.array(["a"]), "dtype <U1"),
        (np.zeros(2, [("x", np.float32)]), "dtype [('x', '<f4')]"),
        (np.array(["2026-01-01"], "datetime64[D]"), "dtype datetime64[D]"),
    ],
)
def test_a_state_leaf_that_is_no_array(thing: Any, kind: str) -> None:
    step, state = training(wrapped())
    with refused(
        CaptureError,
        cause=f"the state leaf 'extra/thing' is of {kind}, not an array of numbers",
        line='jf.capture(step, example=({**state, "extra"',
        hint="close over it, or make the field static",
    ):
        jf.capture(step, example=({**state, "extra": {"thing": thing}}, batch()))


def returning(change: Callable[[State], Any]) -> tuple[Any, State]:
    step, state = training(wrapped())

    def changed(state: State, batch: Batch) -> Any:
        state, metrics = step(state, batch)
        return change(state), metrics

    return changed, state


def refused_at_the_step(cause: str, hint: str) -> Any:
    line = "def changed(state: State, batch: Batch)"
    return refused(CaptureError, cause=cause, line=line, hint=hint)


def test_a_state_leaf_that_changes_its_dtype() -> None:
    def halved(state: State) -> State:
        return {**state, "params": jax.tree.map(lambda x: x.astype(jnp.bfloat16), state["params"])}

    step, state = returning(halved)
    cause = "the state leaf 'params/b' goes in as f32[2] and comes out as bf16[2]"
    with refused_at_the_step(cause, "start with the type it ends with"):
        jf.capture(step, example=(state, batch()))


def test_a_state_leaf_that_changes_its_shape() -> None:
    step, state = returning(lambda state: {**state, "step": jnp.zeros(3)})
    cause = "the state leaf 'step' goes in as f32[] and comes out as f32[3]"
    with refused_at_the_step(cause, "start with the type it ends with"):
        jf.capture(step, example=({**state, "step": jnp.zeros(())}, batch()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: {**s, "extra": jnp.zeros(2)}, "is a dict with extra, opt_state, params"),
        (lambda s: {"params": s["params"]}, "and is a dict with params"),
        (lambda s: {**s, "opt_state": None}, "'opt_state' was a tuple of 2 and is None"),
        (lambda s: {**s, "opt_state": list(s["opt_state"])}, "and is a list of 2"),
        (lambda s: s["params"], "and is a dict with b, w"),
    ],
    ids=["more", "less", "None", "a list", "a part"],
)
def test_a_state_that_changes_its_structure(change: Any, said: str) -> None:
    step, state = returning(change)
    with refused_at_the_step("the state comes back with another structure: ", "came with"):
        jf.capture(step, example=(state, batch()))
    with pytest.raises(CaptureError) as caught:
        jf.capture(step, example=(state, batch()))
    assert said in str(caught.value)


def test_old_keys_made_of_the_wrong_integers_are_jaxs_own_error() -> None:
    step, state = training(wrapped())

    def drawing(state: State, batch: Batch) -> Any:
        noise = jax.random.normal(jax.random.wrap_key_data(state["key"]), (4,))
        return step(state, {**batch, "x": batch["x"] + noise})

    with pytest.raises(TypeError, match="invalid PRNG key data"):
        jf.capture(drawing, example=({**state, "key": np.array([0, 1])}, batch()))
