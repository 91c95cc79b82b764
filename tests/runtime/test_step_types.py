"""`Step[State, Metrics]` keeps the types of the user's function; mypy checks this file."""

from typing import Any, NamedTuple, assert_type, get_type_hints

import jax
import jax.numpy as jnp

import jaxfleet as jf


class Counter(NamedTuple):
    steps: jax.Array


def count_rows(state: Counter, batch: dict[str, jax.Array]) -> tuple[Counter, jax.Array]:
    return Counter(state.steps + 1), batch["x"].sum()


def test_a_step_has_the_types_of_the_function_that_it_was_made_of() -> None:
    state, batch = Counter(jnp.zeros(())), {"x": jnp.ones((4, 2))}
    step = jf.distribute(count_rows, (state, batch), "single")
    assert isinstance(step, jf.Step)
    assert_type(step, jf.Step[Counter, jax.Array])
    after, total = step(state, batch)
    assert_type(after, Counter)
    assert_type(total, jax.Array)
    assert (float(after.steps), float(total)) == (1.0, 8.0)
    assert isinstance(jf.Step[Any, Any], type(jf.Step[Counter, jax.Array]))


def advanced(step: jf.TrainingStep[Counter, jax.Array], state: Counter, batch: Any) -> Counter:
    """A function of a user that takes the step of any mode."""
    with step:
        after, _ = step(state, batch)
        return step.pull(after)


def test_a_function_of_any_step_takes_those_of_all_modes() -> None:
    state, batch = Counter(jnp.zeros(())), {"x": jnp.ones((4, 2))}
    step = jf.distribute(count_rows, (state, batch), "single")
    assert float(advanced(step, state, batch).steps) == 1.0


def test_the_annotations_of_distribute_can_be_read() -> None:
    assert {"train_step", "example", "strategy", "return"} <= get_type_hints(jf.distribute).keys()
