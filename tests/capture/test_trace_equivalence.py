"""Steps that jax builds differently with a letter: compared by parts, never run whole."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxfleet as jf
from jaxfleet.capture import trace_equivalence

TX = jf.distributed_optimizer(optax.sgd(0.1))
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
LAYERS = 12


def training(function: Any) -> Any:
    """Returns a step that trains on the mean of a function of the last layer."""

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            h = x
            for _ in range(LAYERS):
                h = jnp.tanh(h @ w)
            return function(h).mean()

        value, grads = jax.value_and_grad(loss)(w)
        updates, _ = TX.update(grads, TX.init(w), w)
        return optax.apply_updates(w, updates), {"loss": value}

    return step


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Records comparisons of two values: the number of operators computed, and equality."""
    found: list[tuple[int, bool]] = []
    compare = trace_equivalence._compute_the_same  # noqa: SLF001  # what must not see a whole step

    def noting(left: Any, right: Any, pair: Any) -> bool:
        same = compare(left, right, pair)
        found.append((max(len(part.places) for part in pair), same))
        return same

    monkeypatch.setattr(trace_equivalence, "_compute_the_same", noting)
    return found


def test_what_follows_a_part_that_is_proven_is_compared_by_its_structure(
    parts: list[tuple[int, bool]],
) -> None:
    step = training(lambda h: h)
    captured = jf.capture(lambda w, x: step(w, x[::-1] * 2), example=(jnp.eye(4), X))
    assert captured.rows is None
    assert 0 < len(parts) <= 2  # one at each of two sizes, for any number of layers


@pytest.mark.grid
def test_rows_in_reverse_keep_the_letter_by_comparing_a_few_operators(
    parts: list[tuple[int, bool]],
) -> None:
    captured = jf.capture(training(lambda h: h[::-1] * 2), example=(jnp.eye(4), X))
    assert captured.rows is None
    assert parts
    assert max(size for size, _ in parts) < len(captured.program.root.ops) // 4


def test_slices_in_a_loop_with_an_index_from_outside_are_built_alike(
    parts: list[tuple[int, bool]],
) -> None:
    def scanned(h: Any) -> Any:
        def turn(carry: Any, row: Any) -> Any:
            carry = carry.at[:, 1:].add(carry[:, :-1] * row)
            return carry, carry[:, 1]

        return lax.scan(turn, h, jnp.arange(3.0))[1]

    captured = jf.capture(training(scanned), example=(jnp.eye(4), X))
    assert captured.rows is None
    assert parts == []


def test_a_choice_that_is_differentiated_is_compared_by_what_each_branch_keeps(
    parts: list[tuple[int, bool]],
) -> None:
    def chosen(h: Any) -> Any:  # with a letter, the number of rows is kept for the gradient
        return lax.switch(jnp.argmax(h[0]) % 2, [lambda x: x.mean(), lambda x: (x * x).mean()], h)

    captured = jf.capture(training(chosen), example=(jnp.eye(4), X))
    assert captured.rows is None
    assert parts == []


def test_a_branch_on_the_size_is_found_by_a_few_small_parts(parts: list[tuple[int, bool]]) -> None:
    def branching(h: Any) -> Any:
        return h * 3 if h.shape[0] == len(X) else h

    captured = jf.capture(training(branching), example=(jnp.eye(4), X))
    assert captured.rows == len(X)
    assert "in another way (capture/test_trace_equivalence.py" in captured.notes[-1]
    failures = [size for size, same in parts if not same]
    assert 0 < len(failures) <= 4  # then it gives up


def test_what_differs_only_for_numbers_of_one_sign_is_found() -> None:
    def branching(h: Any) -> Any:
        return jnp.abs(h) if h.shape[0] == len(X) else jnp.sqrt(h * h) * jnp.sign(h)

    assert jf.capture(training(branching), example=(jnp.eye(4), X)).rows == len(X)
