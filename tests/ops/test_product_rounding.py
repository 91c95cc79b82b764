"""Each product is rounded before it is added, on any instruction set."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxfleet.ops.product_rounding import rounded

ZERO = jnp.zeros((), jnp.uint32)


def product(zero: Any, *factors: Any) -> Any:
    value = factors[0]
    for factor in factors[1:]:
        value = rounded("jax.mul", value * factor, zero)
    return value


def sums(zero: Any, a: Any, b: Any, c: Any, d: Any) -> tuple[Any, Any, Any]:
    ab = product(zero, a, b)
    moment = product(zero, c, jnp.float32(0.3)) + ab
    other = product(zero, d, jnp.float32(0.7)) + product(zero, a, c)
    return moment, other, a - product(zero, ab, jnp.float32(0.05)) - product(zero, b, d)


def compiled(function: Callable[..., Any], rows: int, isa: str) -> Callable[..., Any]:
    specs = [jax.ShapeDtypeStruct((rows, 5), np.float32)] * 4
    options: dict[str, str | bool] = {}
    if jax.default_backend() == "cpu":
        options["xla_cpu_max_isa"] = isa
    return jax.jit(function).lower(ZERO, *specs).compile(compiler_options=options)


@pytest.mark.parametrize("isa", ["AVX", "AVX2", "AVX512"])  # AVX has no fused products
def test_sums_of_products_are_those_that_numpy_makes(isa: str) -> None:
    rng = np.random.default_rng(0)
    given = [rng.uniform(0.1, 0.9, (60, 5)).astype(np.float32) for _ in range(4)]
    a, b, c, d = given
    f32 = np.float32
    wanted = (c * f32(0.3) + a * b, d * f32(0.7) + a * c, a - a * b * f32(0.05) - b * d)
    for rows in (1, 2, 3, 7, 16, 20, 60):
        run = compiled(sums, rows, isa)
        for start in range(0, 60 - rows + 1, rows):
            made = run(ZERO, *[array[start : start + rows] for array in given])
            for found, all_rows in zip(made, wanted, strict=True):
                assert np.asarray(found).tobytes() == all_rows[start : start + rows].tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn"])
def test_no_value_changes(dtype: str) -> None:
    values = jnp.asarray([0.0, -0.0, 1.5, -2.0, jnp.inf, jnp.nan]).astype(dtype)
    found = jax.jit(rounded, static_argnums=0)("jax.mul", values, ZERO)
    assert found.dtype == values.dtype
    assert np.asarray(found).tobytes() == np.asarray(values).tobytes()


@pytest.mark.parametrize("value", [jnp.arange(3), jnp.ones(2, bool), jnp.ones(2, jnp.complex64)])
def test_what_is_no_float_is_left_alone(value: jax.Array) -> None:
    assert rounded("jax.mul", value, ZERO) is value


def test_sums_are_left_alone() -> None:
    value = jnp.ones(3)
    assert rounded("jax.add", value, ZERO) is value


def test_doubles_are_rounded_too() -> None:
    with jax.enable_x64(True):
        value = jnp.asarray([0.1, -3.0], jnp.float64)
        assert (rounded("jax.mul", value, ZERO) == value).all()


def test_the_compiler_does_not_leave_it_out() -> None:
    spec = jax.ShapeDtypeStruct((64,), np.float32)
    text = jax.jit(product).lower(ZERO, spec, spec).compile().as_text()
    assert text is not None
    assert "xor" in text


def test_it_goes_into_loops() -> None:
    def loop(zero: Any, x: Any) -> Any:
        return lax.fori_loop(0, 3, lambda _, y: product(zero, y, x) + x, x)

    x = np.float32(1.1)
    wanted = x
    for _ in range(3):
        wanted = wanted * x + x
    assert float(jax.jit(loop)(ZERO, x)) == float(wanted)
