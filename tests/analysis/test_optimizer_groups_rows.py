"""Operators that keep the rows of an update apart or mix them, whatever the shapes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jaxfleet.analysis.optimizer_groups import RowLocality, cut_rows
from jaxfleet.errors import PassError
from tests.analysis.groups_steps import ROWS, check_slices, on_gradients, w_of

Function = Callable[[jax.Array], Any]
COLUMNS = 4
ALIKE = np.ones((ROWS, COLUMNS), np.float32)
BY_ROW = np.arange(1, ROWS + 1, dtype=np.float32)[:, None] * ALIKE
MIXING = np.linspace(-1, 1, COLUMNS * COLUMNS, dtype=np.float32).reshape(COLUMNS, COLUMNS)


def branch_on_parity(g: jax.Array) -> jax.Array:
    return 2.0 * g if g.shape[0] % 2 == 0 else -g


def halved_until_small(g: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda _, x: x / 2, g)


def newton_steps(g: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 2, lambda _, x: x - 0.1 * (x @ x.T) @ x, g)


def scaled_by_largest_in_loop(g: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 2, lambda _, x: x / jnp.max(x), g)


def flattened_and_back(g: jax.Array) -> jax.Array:
    return jnp.square(g.reshape(-1)).reshape(g.shape)


def transposed_and_back(g: jax.Array) -> jax.Array:
    return jnp.cumsum(g.T, axis=0).T


def with_columns_counted(g: jax.Array) -> jax.Array:
    return g * (1 + lax.broadcasted_iota(jnp.float32, g.shape, 1))


def only_first_columns(g: jax.Array) -> jax.Array:
    return g.at[:, 2:].set(0.0)


def zero_where_positive(g: jax.Array) -> jax.Array:
    return jnp.where(g > 0, jnp.zeros_like(g), g)


def one_column_for_all(g: jax.Array) -> jax.Array:
    return g + jnp.broadcast_to(jnp.arange(4.0) ** 2, g.shape)


KEEPS_ROWS: dict[str, Function] = {
    "tanh": jnp.tanh,
    "where": zero_where_positive,
    "row_mean": lambda g: g - g.mean(axis=1, keepdims=True),
    "cumsum_in_a_row": lambda g: jnp.cumsum(g, axis=1),
    "sort_in_a_row": lambda g: jnp.sort(g, axis=1),
    "flip_in_a_row": lambda g: g[:, ::-1],
    "roll_in_a_row": lambda g: jnp.roll(g, 1, axis=1),
    "columns_counted": with_columns_counted,
    "one_column_for_all": one_column_for_all,
    "largest_of_a_row": lambda g: jnp.where(g == g.max(axis=1, keepdims=True), g, 0.0),
    "argmax_of_a_row": lambda g: jax.nn.one_hot(jnp.argmax(g, axis=1), COLUMNS),
    "first_columns": only_first_columns,
    "concatenated_columns": lambda g: jnp.concatenate([g[:, 2:], g[:, :2]], axis=1),
    "flattened": flattened_and_back,
    "transposed": transposed_and_back,
    "looked_up_in_a_row": lambda g: jnp.take_along_axis(g, jnp.argsort(g, axis=1), axis=1),
    "rows_in_halves": lambda g: jnp.sort(g.reshape(2 * ROWS, 2), axis=1).reshape(g.shape),
    "three_axes": lambda g: jnp.flip(g.reshape(ROWS, 2, 2), axis=(1, 2)).reshape(g.shape),
    "loop": halved_until_small,
    "summed_in_a_loop": lambda g: lax.fori_loop(0, 3, lambda _, x: x + g, jnp.zeros_like(g)),
    "divided_by_the_number_of_rows": lambda g: g / g.shape[0],
    "branch_on_parity": branch_on_parity,
    "map_over_rows": lambda g: lax.map(jnp.sort, g),
    "zeros": jnp.zeros_like,
    "times_ones": lambda g: g * jnp.ones_like(g),
}

# Exact to the last digits: a row's products may be summed in another order.
KEEPS_ROWS_ROUGHLY: dict[str, Function] = {
    "softmax_of_a_row": lambda g: jax.nn.softmax(g, axis=1),
    "norm_of_a_row": lambda g: g / (1.0 + jnp.linalg.norm(g, axis=1, keepdims=True)),
    "columns_mixed": lambda g: g @ MIXING,
}

REDUCES_ROWS: dict[str, Function] = {
    "norm": lambda g: g / jnp.linalg.norm(g),
    "mean": lambda g: g - g.mean(),
    "column_mean": lambda g: g - g.mean(axis=0),
    "largest": lambda g: g / jnp.max(jnp.abs(g)),
    "softmax_of_a_column": lambda g: jax.nn.softmax(g, axis=0),
    "any": lambda g: jnp.where(jnp.any(g > 1), 0.0, g),
    "product": lambda g: g * jnp.prod(g),
    "branch_on_any": lambda g: lax.cond(jnp.any(g > 0), lambda x: 2 * x, lambda x: x, g),
    "columns_against_columns": lambda g: g @ (g.T @ g),
}

MIXES_ROWS: dict[str, Function] = {
    "cumsum": lambda g: jnp.cumsum(g, axis=0),
    "cumprod": lambda g: jnp.cumprod(g, axis=0),
    "sort": lambda g: jnp.sort(g, axis=0),
    "flip": lambda g: jnp.flip(g, axis=0),
    "roll": lambda g: jnp.roll(g, 1, axis=0),
    "gram": lambda g: g @ g.T @ g,
    "difference": lambda g: jnp.diff(g, axis=0, append=0),
    "row_iota": lambda g: g * jnp.arange(g.shape[0], dtype=g.dtype)[:, None],
    "row_iota_in_place": lambda g: g * lax.broadcasted_iota(jnp.float32, g.shape, 0),
    "noise": lambda g: g + jax.random.normal(jax.random.key(0), g.shape),
    "dropout": lambda g: g * jax.random.bernoulli(jax.random.key(0), 0.5, g.shape),
    "permutation": lambda g: jax.random.permutation(jax.random.key(0), g),
    "constant_by_row": lambda g: g * BY_ROW,
    "column_of_constants": lambda g: g + np.linspace(0, 1, ROWS, dtype=np.float32)[:, None],
    "first_row": lambda g: g - g[0],
    "first_rows": lambda g: g.at[2:].set(0.0),
    "largest_row": lambda g: g.at[jnp.argmax(g.sum(axis=1))].set(0.0),
    "look_up": lambda g: g[jnp.argsort(g[:, 0])],
    "eye": lambda g: g + jnp.eye(ROWS, COLUMNS),
    "triangle": jnp.triu,
    "rows_in_pairs": lambda g: jnp.sort(g.reshape(ROWS // 2, 8), axis=1).reshape(g.shape),
    "pairs_of_rows": lambda g: jnp.flip(g.reshape(ROWS // 2, 2, 4), axis=2).reshape(g.shape),
    "loop_until_all": lambda g: lax.while_loop(lambda x: jnp.any(x > 1), lambda x: x / 2, g),
    "merged_across": lambda g: g.T.reshape(-1)[::-1].reshape(g.T.shape).T,
    "cholesky": lambda g: jnp.linalg.cholesky(g @ g.T + jnp.eye(ROWS)) @ g,
    "fft": lambda g: jnp.fft.fft(g, axis=0).real,
    "newton_steps": newton_steps,
    "reduction_in_a_loop": scaled_by_largest_in_loop,
    "loop_over_rows": lambda g: lax.scan(lambda c, row: (c + row, c), jnp.zeros(COLUMNS), g)[1],
    "convolution": jax.vmap(lambda x: jnp.convolve(x, jnp.ones(3), "same"), 1, 1),
}


@pytest.mark.few(7)
@pytest.mark.parametrize("name", [*KEEPS_ROWS, *KEEPS_ROWS_ROUGHLY])
def test_what_looks_at_one_row_at_a_time_is_row_local_and_exact_on_slices(name: str) -> None:
    group = w_of(on_gradients((KEEPS_ROWS | KEEPS_ROWS_ROUGHLY)[name]))
    assert group.rows is RowLocality.LOCAL, group.reason
    check_slices(group, exact=name in KEEPS_ROWS)


@pytest.mark.parametrize("name", REDUCES_ROWS)
def test_what_sums_over_rows_is_row_reducing(name: str) -> None:
    group = w_of(on_gradients(REDUCES_ROWS[name]))
    assert group.rows is RowLocality.REDUCING, group.reason
    assert group.reason is not None
    assert "reduces its rows" in group.reason.text


@pytest.mark.parametrize("name", MIXES_ROWS)
def test_what_moves_or_counts_rows_is_kept_whole(name: str) -> None:
    group = w_of(on_gradients(MIXES_ROWS[name]))
    assert group.rows is RowLocality.WHOLE
    assert group.reason is not None
    with pytest.raises(PassError, match="cannot be cut along its rows"):
        cut_rows(group)


def test_the_reason_names_the_operator_and_the_line() -> None:
    group = w_of(on_gradients(MIXES_ROWS["cumsum"]))
    assert group.reason is not None
    assert group.reason.op is not None
    assert group.reason.op.type == "jax.cumsum"
    assert "test_optimizer_groups_rows.py" in str(group.reason)


@pytest.mark.parametrize(
    ("shape", "why"),
    [((), "no rows"), ((1, 4), "a single row"), ((0, 4), "no elements"), ((4, 0), "no elements")],
)
def test_what_has_no_rows_to_cut_is_kept_whole(shape: tuple[int, ...], why: str) -> None:
    group = w_of(optax.adam(0.1), {"w": np.ones(shape, np.float32)})
    assert group.rows is RowLocality.WHOLE
    assert group.reason is not None
    assert why in group.reason.text


def test_a_square_matrix_is_cut_by_rows_and_not_by_columns() -> None:
    square = {"w": np.ones((4, 4), np.float32)}
    by_row = on_gradients(lambda g: g - g.mean(axis=1, keepdims=True))
    by_column = on_gradients(lambda g: g - g.mean(axis=0, keepdims=True))
    transposed = on_gradients(lambda g: g + g.T)
    assert w_of(by_row, square).rows is RowLocality.LOCAL
    assert w_of(by_column, square).rows is RowLocality.REDUCING
    assert w_of(transposed, square).rows is RowLocality.WHOLE


def test_state_of_a_row_follows_it_and_state_of_columns_does_not() -> None:
    def keeping(axis: int) -> optax.GradientTransformation:
        def init(params: Any) -> Any:
            return jax.tree.map(lambda leaf: leaf.sum(axis=axis), params)

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            state = jax.tree.map(lambda g, s: 0.9 * s + (g * g).sum(axis=axis), updates, state)
            scaled = jax.tree.map(lambda g, s: g / jnp.expand_dims(s, axis), updates, state)
            return scaled, state

        return optax.GradientTransformation(init, update)

    matrix = {"w": np.ones((ROWS, COLUMNS), np.float32)}
    by_row, by_column = w_of(keeping(1), matrix), w_of(keeping(0), matrix)
    assert by_row.rows is RowLocality.LOCAL, by_row.reason
    check_slices(by_row)
    assert by_column.rows is RowLocality.WHOLE
    assert by_column.reason is not None
    assert "made of all of its rows" in by_column.reason.text
