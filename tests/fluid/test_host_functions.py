"""`py_func` and `Print`: execution on the host, gradients, and output."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import ProgramError, WrongTypeError
from jaxfleet.fluid import layers
from jaxfleet.ops.fluid import host_functions
from tests.fluid.nets import fresh
from tests.fluid.parallel import devices
from tests.fluid.pserver.jobs import run_job
from tests.fluid.unrolled import Array, gradients, same

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(4, 3)).astype("f4")
W: dict[str, Array] = {"w": RANDOM.normal(size=(3, 3)).astype("f4")}


def declared(like: fluid.Variable) -> fluid.Variable:
    block = fluid.default_main_program().current_block()
    name = fluid.unique_name.generate("made")
    return block.create_var(name=name, dtype=like.dtype, shape=like.shape)


def tanh(x: Array) -> Array:
    return np.tanh(x)


def tanh_back(made: Array, grad: Array) -> Array:
    return np.asarray(grad) * (1 - np.square(made))


def through_host(x: fluid.Variable) -> fluid.Variable:
    made: fluid.Variable = layers.py_func(
        tanh, x, declared(x), backward_func=tanh_back, skip_vars_in_backward_input=x
    )
    return made


def net(act: Any) -> fluid.Variable:
    x = layers.data("x", [3], stop_gradient=False)
    return layers.mean(layers.square(act(layers.fc(x, 3, param_attr="w", bias_attr=False))))


def test_a_function_of_the_scripts_has_the_gradients_that_another_computes() -> None:
    made = gradients(lambda: net(through_host), {"x": X}, W, ["x"])
    same(made, gradients(lambda: net(layers.tanh), {"x": X}, W, ["x"]))


def test_a_function_within_a_loop_has_its_gradients_too() -> None:
    def looped(act: Any) -> fluid.Variable:
        h = layers.assign(layers.data("x", [3], stop_gradient=False))
        i, n = (layers.fill_constant([1], "int64", value) for value in (0, 2))
        layers.while_loop(
            lambda i, _: layers.less_than(i, n),
            lambda i, h: [i + 1, act(layers.fc(h, 3, param_attr="w", bias_attr=False))],
            [i, h],
        )
        return layers.mean(h)

    made = gradients(lambda: looped(through_host), {"x": X}, W, ["x"])
    same(made, gradients(lambda: looped(layers.tanh), {"x": X}, W, ["x"]))


def test_gradients_end_at_a_function_without_a_backward() -> None:
    def build() -> fluid.Variable:
        x = layers.data("x", [3], stop_gradient=False)
        hidden = layers.fc(x, 3, param_attr="w", bias_attr=False)
        return layers.mean(hidden + layers.py_func(tanh, hidden, declared(hidden)))

    made = gradients(build, {"x": X}, W)
    np.testing.assert_allclose(made["w"], np.tile(X.sum(0)[:, None], 3) / 12, rtol=1e-5)


def test_a_function_that_returns_nothing_sees_its_arrays() -> None:
    seen: list[Array] = []
    with fresh() as (main, _):
        x = layers.data("x", [3])
        layers.py_func(lambda a, b: seen.append(a + b), [x, layers.scale(x, 2.0)], None)
        (out,) = fluid.Executor().run(main, {"x": X}, [layers.mean(x)])
    jax.effects_barrier()
    assert out.shape == (1,)
    np.testing.assert_allclose(seen, [3 * X], rtol=1e-6)


def test_a_function_runs_in_each_trainer_of_a_job_with_servers() -> None:
    def build() -> fluid.Variable:
        loss = net(through_host)
        fluid.optimizer.SGD(0.1).minimize(loss)
        return loss

    def oracle() -> fluid.Variable:
        loss = net(layers.tanh)
        fluid.optimizer.SGD(0.1).minimize(loss)
        return loss

    feeds = [[{"x": X[:2]}], [{"x": X[2:]}]]
    made, wanted = run_job(build, feeds, servers=1), run_job(oracle, feeds, servers=1)
    same(made.params[0], wanted.params[0])


def test_a_function_runs_on_each_device_with_its_rows() -> None:
    rows: list[int] = []

    def counted(x: Array) -> Array:
        rows.append(len(x))
        return np.tanh(x)

    with fresh() as (main, _), devices(2):
        x = layers.data("x", [3])
        loss = layers.mean(layers.py_func(counted, x, declared(x)))
        made = fluid.CompiledProgram(main).with_data_parallel(loss_name=loss.name)
        (found,) = fluid.Executor().run(made, {"x": X}, [loss])
    np.testing.assert_allclose(found.mean(), np.tanh(X).mean(), rtol=1e-5)
    assert set(rows) == {2}


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clears the registered functions."""
    monkeypatch.setattr(host_functions, "_HOST", host_functions._Host())


def square(x: Array) -> Array:
    return np.asarray(np.square(x))


def saved(function: Callable[[Array], Array]) -> bytes:
    with fresh() as (main, _):
        x = layers.data("x", [3])
        out = main.global_block().create_var(name="out", dtype=x.dtype, shape=x.shape)
        layers.py_func(function, x, out)
        return main.desc.serialize_to_string()


def test_a_program_of_another_process_calls_its_own_function_or_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = saved(tanh)
    another_process(monkeypatch)
    saved(square)  # the first function that this process registers
    read = fluid.Program.parse_from_string(data)
    with pytest.raises(ProgramError, match=r"has registered no function '.*\.tanh:") as caught:
        fluid.Executor().run(read, {"x": X}, ["out"])
    assert ".tanh', as it was saved, in any program" in str(caught.value.__notes__)
    saved(tanh)
    (found,) = fluid.Executor().run(read, {"x": X}, ["out"])
    np.testing.assert_allclose(found, np.tanh(X), rtol=1e-6)


class Scale:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: Array) -> Array:
        return x * self.by

    def apply(self, x: Array) -> Array:
        return x * self.by


def times(x: Array, by: Any) -> Array:
    return np.asarray(x * by)


def scaled(by: Any) -> Callable[[Array], Array]:
    return lambda x: np.asarray(x * by)


def applied(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda x: function(x) + 0


@pytest.mark.parametrize(
    "make",
    [
        scaled,
        lambda by: scaled(np.full(2, by)),
        lambda by: partial(times, by=by),
        lambda by: Scale(by).apply,
        Scale,
        lambda by: applied(scaled(by)),
        lambda by: applied(np.tanh if by == 2.0 else np.square),
    ],
    ids=["closure", "array", "partial", "method", "object", "nested", "numpy"],
)
def test_functions_that_hold_other_values_have_other_names(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[float], Callable[[Array], Array]]
) -> None:
    another_process(monkeypatch)
    two, three, again = (host_functions.register_function(make(by)) for by in (2.0, 3.0, 2.0))
    assert two.partition(":")[0] == three.partition(":")[0]
    assert "#" not in two + three  # the digest tells them apart
    assert again.partition("#")[0] == two


def test_partial_functions_are_named_by_what_they_call() -> None:
    first, second = (host_functions.register_function(partial(f)) for f in (tanh, square))
    assert first.partition(":")[0].endswith(".tanh")
    assert second.partition(":")[0].endswith(".square")


def test_equal_functions_are_numbered_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    another_process(monkeypatch)
    objects = [scaled(object()) for _ in range(2)]
    first, second = map(host_functions.register_function, objects)
    assert second == f"{first}#1"
    assert host_functions.register_function(objects[1]) == second


def test_functions_that_hold_themselves_have_a_name() -> None:
    def loop(x: Array) -> Array:
        return loop(x) if x.sum() > 100 else x

    assert host_functions.register_function(loop) == host_functions.register_function(loop)


def test_a_function_of_the_same_place_with_other_values_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = saved(partial(times, by=2.0))
    another_process(monkeypatch)
    saved(partial(times, by=3.0))
    read = fluid.Program.parse_from_string(data)
    with pytest.raises(ProgramError, match=r"\.times:.*' has other code, or holds other values"):
        fluid.Executor().run(read, {"x": X}, ["out"])


def test_threads_that_register_functions_get_a_name_each() -> None:
    made = [lambda x: x for _ in range(64)]
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(host_functions.register_function, made))
    assert len(set(names)) == 64
    assert all(host_functions._function(n) is f for n, f in zip(names, made, strict=True))


def test_print_shows_values_and_gradients_so_often(capsys: pytest.CaptureFixture[str]) -> None:
    with fresh() as (main, _):
        x = fluid.data("x", [2])
        x.stop_gradient = False
        shown = layers.Print(x, first_n=1, message="here", summarize=1)
        (grad,) = fluid.gradients([layers.reduce_sum(layers.scale(shown, 3.0))], [x])
        for _ in range(2):
            made = fluid.Executor().run(main, {"x": np.array([5, 6], "f4")}, [grad])
        jax.effects_barrier()
    assert made[0].tolist() == [3, 3]
    text = capsys.readouterr().out
    assert text.count("Variable: x\n  - message: here\n") == 1
    assert "  - shape: [2]\n  - dtype: float32\n  - data: [5.0]\n" in text
    assert text.count("Variable: x@GRAD\n") == 1
    assert "  - data: [3.0]\n" in text


def test_what_is_no_function_or_has_no_shape_is_refused() -> None:
    with fresh():
        x = layers.data("x", [3])
        with pytest.raises(WrongTypeError, match="'func' is not a function"):
            layers.py_func(x, x, x)  # type: ignore[arg-type]
        out = fluid.default_main_program().current_block().create_var(name="out", dtype="float32")
        with pytest.raises(ProgramError, match="the shape of 'out' is not known"):
            layers.py_func(tanh, x, out)
        with pytest.raises(ProgramError, match="there is no print_phase 'all'"):
            layers.Print(x, print_phase="all")
