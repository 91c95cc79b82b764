"""Parameters of jax's primitives become data, and data becomes parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

from jaxfleet.ir import Attrs, Literal, Size, evaluate
from jaxfleet.ir.attributes import Word
from jaxfleet.ops import jax_adapter

NUMBERS = lax.GatherDimensionNumbers((0,), (1,), (1,))


def size_of_six(size: Size) -> int:
    return evaluate(size, {"b": 6})


def there_and_back(value: Any) -> Any:
    return jax_adapter.decode(jax_adapter.encode(value), size_of_six)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, 0.5, "x", (1, (2, None)), ()),
        np.dtype("float32"),
        np.dtype(jnp.bfloat16),
        lax.GatherScatterMode.CLIP,
        lax.Precision.HIGHEST,
        (lax.Precision.DEFAULT, lax.Precision.HIGH),
        NUMBERS,
        lax.add_p,
    ],
)
def test_a_parameter_comes_back_as_it_was(value: Any) -> None:
    found = there_and_back(value)
    assert found == value
    assert type(found) is type(value)


def test_numpys_numbers_become_pythons() -> None:
    assert jax_adapter.encode((np.int64(2), np.float32(0.5))) == (2, 0.5)


def test_not_a_number_comes_back() -> None:
    assert np.isnan(jax_adapter.decode(Word("nan"), size_of_six))


def test_a_symbolic_size_becomes_the_number_that_it_is() -> None:
    (rows,) = export.symbolic_shape("b")
    assert there_and_back((rows, 2 * rows - 1, rows // 4)) == (6, 11, 1)


@pytest.mark.parametrize("value", [print, object(), {1: 2}])
def test_what_is_not_data_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        jax_adapter.encode(value)


@pytest.mark.parametrize(
    ("value", "dtype", "text"),
    [
        (1, jnp.int32, "1:i32"),
        (0.1, jnp.float32, "0.10000000149011612:f32"),
        (2, jnp.bfloat16, "2.0:bf16"),
        (True, jnp.bool_, "true:bool"),
        (1 - 2j, jnp.complex64, "1.0+-2.0i:c64"),
        (np.inf, jnp.float16, "inf:f16"),
    ],
)
def test_a_scalar_is_a_literal_of_its_dtype(value: Any, dtype: Any, text: str) -> None:
    literal = jax_adapter.literal_of(value, np.dtype(dtype))
    assert str(literal) == text
    assert isinstance(literal, Literal)
    found = jax_adapter.literal_value(literal)
    assert (found.dtype, found) == (np.dtype(dtype), np.asarray(value, dtype))


def test_parameters_that_are_none_are_left_out_and_put_back() -> None:
    (eqn,) = jax.make_jaxpr(lambda x: lax.mul(x, x))(jnp.ones(2)).eqns
    attrs = jax_adapter.encode_params(eqn)
    assert dict(attrs) == {}
    (result,) = jax_adapter.bind("mul", [jnp.full(2, 3.0)] * 2, attrs, size_of_six)
    assert result.tolist() == [9.0, 9.0]


def test_a_primitive_that_there_is_not_has_no_meaning() -> None:
    assert jax_adapter.find_primitive("frobnicate") is None
    with pytest.raises(KeyError):
        jax_adapter.bind("frobnicate", [], Attrs(), size_of_six)
