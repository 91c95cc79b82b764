"""Cases of fluid's own tests on the inputs of executors; `peer_cases.md` lists them."""

from typing import Any
from unittest import mock

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid import layers
from jaxfleet.fluid.lowering.feeding import as_tensor
from tests.fluid.nets import fresh

X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


class Two:
    """Two losses with one optimizer and one parameter each."""

    def __init__(self) -> None:
        with fresh() as (self.main, startup):
            x = fluid.data("x", [None, 3])
            self.losses, self.made = [], []
            for name in ("w1", "w2"):
                out = layers.fc(x, 1, param_attr=name, bias_attr=False)
                self.losses.append(layers.mean(out))
            for loss, name in zip(self.losses, ("w1", "w2"), strict=True):
                sgd = fluid.optimizer.SGD(0.1)
                self.made.append(sgd.minimize(loss, parameter_list=[name]))
        self.exe, self.scope = fluid.Executor(fluid.CPUPlace()), fluid.Scope()
        self.exe.run(startup, scope=self.scope)

    def run(self, fetch_list: list[Any], **more: Any) -> list[Any]:
        return self.exe.run(
            self.main, feed={"x": X}, fetch_list=fetch_list, scope=self.scope, **more
        )

    def weights(self) -> list[np.ndarray]:
        return [np.array(self.scope[name]) for name in ("w1", "w2")]


@pytest.mark.parametrize("cached", [True, False])
def test_a_program_runs_repeatedly_with_and_without_its_cache(cached: bool) -> None:
    with fresh() as (main, _):
        x = layers.data("x", [784])
        y = layers.data("y", [784, 100], append_batch_size=False)
        out = layers.mul(x, y)
    random = np.random.default_rng(1)
    exe = fluid.Executor(fluid.CPUPlace())
    for _ in range(3):
        a, b = (random.random(size).astype(np.float32) for size in ((100, 784), (784, 100)))
        (made,) = exe.run(
            main, feed={"x": a, "y": b}, fetch_list=[out.name], use_program_cache=cached
        )
        assert made.shape == (100, 100)
        np.testing.assert_allclose(made, a @ b, rtol=1e-4)


@pytest.mark.parametrize("rate", [0.01, 0])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_number_is_fed_in_the_declared_dtype(rate: float, compiled: bool) -> None:
    with fresh() as (main, startup):
        x = fluid.data("x", [None, 3])
        learning_rate = fluid.data("lr", [1])
        loss = layers.mean(layers.fc(x, 1, param_attr="w", bias_attr=False))
        fluid.optimizer.SGD(learning_rate).minimize(loss)
    exe, scope = fluid.Executor(fluid.CPUPlace()), fluid.Scope()
    exe.run(startup, scope=scope)
    program = fluid.CompiledProgram(main) if compiled else main
    before = np.array(scope["w"])
    (fed,) = exe.run(program, feed={"x": X, "lr": rate}, fetch_list=[learning_rate], scope=scope)
    assert fed.dtype == np.float32
    np.testing.assert_allclose(fed, [rate])
    moved = before - rate * X.mean(0)[:, None]
    np.testing.assert_allclose(scope["w"], moved, rtol=1e-5)


def test_a_number_without_a_dtype_is_refused() -> None:
    assert as_tensor(1, "float32").dtype == np.float32
    with pytest.raises(AssertionError, match="of no dtype"):
        as_tensor(1, None)


def test_a_program_is_pruned_once_per_fetch_list() -> None:
    two = Two()
    pruning = mock.patch.object(
        fluid.Executor, "_prune_program", side_effect=fluid.Executor._prune_program
    )
    with pruning as pruned:
        for _ in range(10):
            two.run([two.losses[0]], use_prune=True)
        assert pruned.call_count == 1
        two.run([two.losses[1]], use_prune=True)
        assert pruned.call_count == 2


def test_fetching_one_optimizers_updates_runs_nothing_else() -> None:
    two = Two()
    before = two.weights()
    (loss,) = two.run([two.losses[0], two.made[0]])
    after = two.weights()
    np.testing.assert_allclose(loss, (X @ before[0]).mean(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after[0], before[0] - 0.1 * X.mean(0)[:, None], rtol=1e-5)
    np.testing.assert_array_equal(after[1], before[1])
    assert two.losses[1].name not in two.scope


def test_programs_that_cannot_be_compiled_or_shared_are_refused() -> None:
    with pytest.raises(TypeError, match="of type str, not Program or Graph"):
        fluid.CompiledProgram("program")  # type: ignore[arg-type]
    two = Two()
    compiled = fluid.CompiledProgram(two.main)
    compiled._compile(two.scope, fluid.CPUPlace())
    with pytest.raises(ValueError, match="for another scope"):
        compiled._compile(fluid.Scope(), fluid.CPUPlace())
    with pytest.raises(ValueError, match="and is run on"):
        compiled._compile(two.scope, fluid.CUDAPlace(0))
    name = two.losses[0].name
    with pytest.raises(ValueError, match="for one device"):
        shares(two, fluid.CompiledProgram(two.main))
    with pytest.raises(ValueError, match="has not run"):
        shares(two, fluid.CompiledProgram(two.main).with_data_parallel(loss_name=name))


def shares(two: Two, other: fluid.CompiledProgram) -> None:
    """Compiles a program that shares the parameters of another."""
    compiled = fluid.CompiledProgram(two.main).with_data_parallel(
        loss_name=two.losses[0].name, share_vars_from=other, places=fluid.cpu_places(2)
    )
    compiled._compile(two.scope, fluid.CPUPlace())
