"""Results of `Executor.run`: arrays that convert to numbers, or LoDTensors."""

import copy
import math
import pickle
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid.executor.fetching import FetchedArray
from tests.fluid.nets import fresh

FEED = {"x": np.arange(6, dtype=np.float32).reshape(3, 2)}


@pytest.fixture
def fetched() -> Iterator[Any]:
    """Yields a call that fetches a loss `f32[1]` and an output `f32[b,1]`."""
    with fresh() as (main, startup), fluid.scope_guard(fluid.Scope()):
        x = fluid.data("x", [None, 2])
        out = fluid.layers.fc(x, 1, param_attr=fluid.initializer.Constant(1.0))
        loss = fluid.layers.mean(out)
        exe = fluid.Executor(fluid.CPUPlace())
        exe.run(startup)
        yield lambda **options: exe.run(main, feed=FEED, fetch_list=[loss, out], **options)


def test_a_fetched_loss_converts_by_float_and_formats_as_a_number(fetched: Any) -> None:
    loss, _ = fetched()
    assert loss.shape == (1,)
    assert float(loss) == 5.0
    assert int(loss) == 5
    assert f"{'%.3f'}" % loss == "5.000"
    assert "step %d, loss %f" % (7, loss) == "step 7, loss 5.000000"  # noqa: UP031  # as scripts do
    assert "%d" % loss == "5"  # noqa: UP031
    assert not math.isnan(loss)
    assert complex(loss) == 5


def test_rows_of_a_fetched_array_convert_too(fetched: Any) -> None:
    _, out = fetched()
    assert ["%.2f" % row for row in out] == ["1.00", "5.00", "9.00"]  # noqa: UP031
    assert float(out[1]) == 5.0
    assert float(2 * out[1] + 1) == 11.0


def test_an_array_of_several_elements_is_no_number(fetched: Any) -> None:
    _, out = fetched()
    with pytest.raises(TypeError):
        float(out)


def test_a_fetched_array_prints_pickles_and_computes_as_numpys(fetched: Any) -> None:
    loss, out = fetched()
    assert repr(loss) == "array([5.], dtype=float32)"
    assert str(out.tolist()) == "[[1.0], [5.0], [9.0]]"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        kept = pickle.loads(pickle.dumps(out, protocol))  # noqa: S301  # its own
        assert type(kept) is np.ndarray
        np.testing.assert_array_equal(kept, out)
    assert type(out.sum()) is np.float32
    assert type(np.mean(out)) is np.float32
    assert float(copy.deepcopy(loss)) == 5.0
    assert isinstance(jax.jit(lambda x: x + 1)(out), jax.Array)


def test_a_fetch_of_a_data_parallel_program_and_of_parts_converts(fetched: Any) -> None:
    fetched()
    main = fluid.default_main_program()
    loss = main.global_block().ops[-1].output("Out")[0]
    compiled = fluid.CompiledProgram(main).with_data_parallel(places=[fluid.CPUPlace()])
    exe = fluid.Executor(fluid.CPUPlace())
    (whole,) = exe.run(compiled, feed=FEED, fetch_list=[loss])
    ((part,),) = exe.run(compiled, feed=FEED, fetch_list=[loss], return_merged=False)
    assert float(whole) == float(part) == 5.0
    assert isinstance(part, FetchedArray)


def test_without_numpy_every_value_is_a_lod_tensor(fetched: Any) -> None:
    loss, out = fetched(return_numpy=False)
    assert isinstance(loss, fluid.LoDTensor)
    assert isinstance(out, fluid.core.LoDTensor)
    assert out.lod() == []
    assert out.shape() == [3, 1]
    assert out._dtype() == "float32"
    np.testing.assert_array_equal(np.array(out), [[1.0], [5.0], [9.0]])
    np.testing.assert_array_equal(jax.numpy.asarray(out) + 1, [[2.0], [6.0], [10.0]])


def test_a_fetched_lod_tensor_can_be_fed_again(fetched: Any) -> None:
    _, out = fetched(return_numpy=False)
    with fresh() as (main, _):
        y = fluid.data("y", [None, 1])
        double = fluid.layers.scale(y, 2.0)
        (made,) = fluid.Executor().run(main, feed={"y": out}, fetch_list=[double])
    np.testing.assert_array_equal(made, [[2.0], [10.0], [18.0]])


def test_the_steps_of_a_run_take_the_documents_arguments(fetched: Any) -> None:
    fetched()
    exe, main = fluid.Executor(fluid.CPUPlace()), fluid.default_main_program()
    loss = main.global_block().ops[-1].output("Out")[0]
    names = ("feed", "fetch")
    (one,) = exe._run_impl(main, FEED, [loss], *names, None, True, False, True, False)
    (two,) = exe._run_program(None, FEED, [loss], *names, None, True, False)
    assert float(one) == float(two) == 5.0
    compiled = fluid.CompiledProgram(main).with_data_parallel(
        places=[fluid.CPUPlace(), fluid.CPUPlace()]
    )
    fed = {"x": np.tile(FEED["x"], (2, 1))}
    scope = fluid.global_scope()
    (each,) = exe._run_parallel(compiled, scope, fed, [loss], "fetch", True, True)
    np.testing.assert_array_equal(each, [5.0, 5.0])


def test_an_inference_program_runs_by_the_executor_that_is_given() -> None:
    class Doubles:
        def run(self, feed: list[int]) -> list[int]:
            return [2 * number for number in feed]

    assert fluid.Executor()._run_inference(Doubles(), [1, 2]) == [2, 4]
