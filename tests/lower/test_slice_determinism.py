"""A block computes the same on some rows as on all, for all functions in it."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfleet.ir import parse
from jaxfleet.lower import ExecutableCache, lower_block
from jaxfleet.lower.blocks import compiler_options

ROWS = 330
TEXT = """
program p
  param w: f32[ROWS,6]
  state m: f32[ROWS,6]
  block 0
    temp g: f32[ROWS,6]
    rpc
      listen_and_serv() {optimize_blocks=[^1]}
  block 1
    optimize
      a: f32[ROWS,6] = jax.mul(g, g)
      m = jax.add(a, m)
      above: bool[ROWS,6] = jax.gt(m, 0.0:f32)
      b: f32[ROWS,6] = jax.add(m, 1e-7:f32)
      c: f32[ROWS,6] = jax.FUNCTION(b)
      s: f32[ROWS,6] = jax.select_n(above, b, c)
      d: f32[ROWS,6] = jax.mul(s, g)
      e: f32[ROWS,6] = jax.mul(-0.1:f32, d)
      w = jax.add(w, e)
"""


def text(function: str, rows: int) -> str:
    return TEXT.replace("ROWS", str(rows)).replace("FUNCTION", function)


@pytest.mark.few(1)
@pytest.mark.parametrize("function", ["rsqrt", "sqrt", "tanh", "logistic", "atan", "exp", "log1p"])
def test_an_element_is_the_same_in_any_slice(function: str) -> None:
    rng, cache = np.random.default_rng(0), ExecutableCache()
    whole = {
        "w": rng.normal(size=(ROWS, 6)).astype(np.float32),
        "m": (rng.uniform(0, 0.9, (ROWS, 6)) ** 2).astype(np.float32),
        "g": (rng.normal(size=(ROWS, 6)) * 0.1).astype(np.float32),
    }

    def run(start: int, rows: int) -> list[Any]:
        block = lower_block(parse(text(function, rows)), 1, donate=(), cache=cache)
        values = [jnp.asarray(whole[name][start : start + rows]) for name in block.reads]
        return [np.asarray(value) for value in block.function(values)]

    wanted = run(0, ROWS)
    for rows in (1, 2, 11):
        for start in range(0, ROWS - rows + 1, rows):
            for found, all_rows in zip(run(start, rows), wanted, strict=True):
                assert found.tobytes() == all_rows[start : start + rows].tobytes()


def test_only_functions_of_arrays_cost_the_vectors() -> None:
    for function in ("rsqrt", "sqrt", "abs"):
        program = parse(text(function, 4))
        assert compiler_options(program, program.blocks[1]) == {}
    number = text("abs", 4).replace("jax.mul(-0.1:f32, d)", "jax.mul(t, d)")
    number = number.replace("      a:", "      t: f32[] = jax.exp(0.1:f32)\n      a:")
    program = parse(number)
    assert compiler_options(program, program.blocks[1]) == {}
