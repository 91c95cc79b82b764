"""Initial values of parameters, and the forms of parameter attributes in layers."""

import math
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import ProgramError
from jaxfleet.fluid import initializer as begin
from jaxfleet.fluid import layers
from jaxfleet.runtime import Scope
from tests.fluid.nets import fresh

SHAPE = [40, 50, 3, 3]
INTO, OUT_OF = 50 * 9, 40 * 9


def begun(*ways: begin.Initializer, shape: list[int] = SHAPE) -> list[np.ndarray]:
    """Returns parameters with these initializers."""
    scope = Scope()
    with fresh() as (_, startup), fluid.scope_guard(scope):
        startup.random_seed = 5
        for number, way in enumerate(ways):
            attr = fluid.ParamAttr(f"w{number}", initializer=way)
            layers.create_parameter(shape, "float32", attr=attr)
        fluid.Executor().run(startup)
        return [np.asarray(scope[f"w{number}"]) for number in range(len(ways))]


def test_each_initializer_draws_from_where_it_says() -> None:
    uniform, normal, cut, xavier, wide, msra, narrow, constant = begun(
        begin.Uniform(-0.5, 1.5),
        begin.Normal(1.0, 2.0),
        begin.TruncatedNormal(1.0, 2.0),
        begin.Xavier(),
        begin.Xavier(uniform=False, fan_in=10, fan_out=40),
        begin.MSRA(uniform=False),
        begin.MSRA(fan_in=200),
        begin.Constant(0.25),
    )
    assert (uniform.min() >= -0.5, uniform.max() <= 1.5) == (True, True)
    assert uniform.mean() == pytest.approx(0.5, abs=0.02)
    assert (normal.mean(), normal.std()) == pytest.approx((1.0, 2.0), abs=0.05)
    assert np.abs(cut - 1.0).max() <= 4.0
    assert cut.std() == pytest.approx(2.0 * 0.8796, abs=0.05)  # normal, cut at two deviations
    limit = math.sqrt(6 / (INTO + OUT_OF))
    assert np.abs(xavier).max() == pytest.approx(limit, rel=0.01)
    assert wide.std() == pytest.approx(math.sqrt(2 / 50), rel=0.02)
    assert msra.std() == pytest.approx(math.sqrt(2 / INTO), rel=0.02)
    assert np.abs(narrow).max() == pytest.approx(math.sqrt(6 / 200), rel=0.01)
    assert set(constant.ravel()) == {0.25}


def test_a_diagonal_and_given_values() -> None:
    given = np.arange(12, dtype=np.float32).reshape(3, 4)
    diagonal, values = begun(
        begin.Uniform(-1.0, 1.0, diag_num=3, diag_step=4, diag_val=7.0),
        begin.NumpyArrayInitializer(given),
        shape=[3, 4],
    )
    assert [diagonal[n, n] for n in range(3)] == [7.0, 7.0, 7.0]
    assert (diagonal == 7.0).sum() == 3
    np.testing.assert_array_equal(values, given)


def test_bilinear_filters_enlarge_an_image_evenly() -> None:
    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        image = layers.data("image", [1, 3, 4])
        attr = fluid.ParamAttr(initializer=begin.Bilinear(), trainable=False)
        large = layers.conv2d_transpose(
            image, 1, filter_size=4, padding=1, stride=2, param_attr=attr, bias_attr=False
        )
        exe = fluid.Executor()
        exe.run(startup)
        rows, columns = np.mgrid[:3, :4].astype(np.float32)
        feed = {"image": (2 * rows + columns)[None, None]}
        (made,) = exe.run(main, feed=feed, fetch_list=[large])
    assert large.shape == (-1, 1, 6, 8)
    inner = made[0, 0, 1:-1, 1:-1]  # the edges mix with padding
    np.testing.assert_allclose(np.diff(inner, axis=0), 1.0, rtol=1e-5)
    np.testing.assert_allclose(np.diff(inner, axis=1), 0.5, rtol=1e-5)


@pytest.mark.parametrize("name", ["Constant", "Uniform", "Normal", "TruncatedNormal", "Xavier",
                                  "MSRA", "Bilinear"])  # fmt: skip
def test_both_of_fluids_names(name: str) -> None:
    assert getattr(begin, name) is getattr(begin, f"{name}Initializer")


def test_what_describes_a_parameter() -> None:
    decay = fluid.regularizer.L2Decay(0.1)
    with fresh() as (main, startup):
        x = layers.data("x", [3])
        layers.fc(x, 2, param_attr="named", bias_attr=False)
        layers.fc(x, 2, param_attr=begin.Constant(2.0), bias_attr=decay, name="mine")
        layers.fc([x, x], 2, param_attr=["first", "second"], act="relu")
        with pytest.raises(TypeError, match="a parameter is described by a ParamAttr, not by int"):
            layers.fc(x, 2, param_attr=3)
        with pytest.raises(ProgramError, match="2 inputs have 3 param_attr"):
            layers.fc([x, x], 2, param_attr=["a", "b", "c"])
        with pytest.raises(ProgramError, match="'nothing'"):
            layers.fc(x, 2, act="nothing")
        found = {p.name: p for p in main.all_parameters()}
        values = {op.output("Out")[0]: op.attr("value") for op in startup.global_block().ops}
    assert set(found) >= {"named", "mine.w_0", "mine.b_0", "first", "second"}
    assert "fc_0.b_0" not in found
    assert found["mine.b_0"].regularizer is decay
    assert values["mine.w_0"] == 2.0


def test_beginnings_that_do_not_fit() -> None:
    def parameter(way: Any, shape: list[int]) -> None:
        attr = fluid.ParamAttr(initializer=way)
        layers.create_parameter(shape, "float32", attr=attr)

    with fresh():
        with pytest.raises(ProgramError, match=r"is \[2, 3\], and begins with an array \[5\]"):
            parameter(begin.NumpyArrayInitializer(np.zeros(5)), [2, 3])
        with pytest.raises(ProgramError, match=r"are \[out, in, n, n\]"):
            parameter(begin.Bilinear(), [2, 3])
        with pytest.raises(TypeError, match="the value of a NumpyArrayInitializer"):
            begin.NumpyArrayInitializer([1.0])  # type: ignore[arg-type]
