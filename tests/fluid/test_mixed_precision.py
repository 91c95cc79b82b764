"""Mixed precision of fluid's programs: numpy's half precision, and the loss scaling rule."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import PassError
from jaxfleet.fluid.contrib.mixed_precision import AutoMixedPrecisionLists, decorate
from jaxfleet.fluid.incubate.fleet.base.role_maker import UserDefinedCollectiveRoleMaker
from jaxfleet.fluid.incubate.fleet.collective import Collective, DistributedStrategy
from jaxfleet.ops.fluid.updates import update_loss_scaling
from tests.fluid.nets import fresh
from tests.fluid.parallel import devices

RATE, ROWS = 0.1, 8


class Halves:
    """A net that the collective fleet trains in mixed precision, with one worker or two.

    Args:
        scale: the initial loss scale.
        fields: further fields of the strategy.
    """

    def __init__(self, scale: float, endpoints: int = 1, **fields: Any) -> None:
        strategy = DistributedStrategy()
        for name, value in {"use_amp": True, "amp_loss_scaling": scale, **fields}.items():
            setattr(strategy, name, value)
        fleet = Collective()
        names = [f"127.0.0.1:{6170 + n}" for n in range(endpoints)]
        fleet.init(UserDefinedCollectiveRoleMaker(0, names))
        with fresh() as (self.main, startup):
            self.main.random_seed = startup.random_seed = 5
            x, y = fluid.data("x", [None, 4]), fluid.data("y", [None, 1])
            self.guess = fluid.layers.fc(x, 1, param_attr="w", bias_attr=False)
            self.loss = fluid.layers.mean(fluid.layers.square_error_cost(self.guess, y))
            optimizer = fleet.distributed_optimizer(fluid.optimizer.SGD(RATE), strategy)
            self.made = optimizer.minimize(self.loss, startup)
        self.exe, self.scope, self.runs = fluid.Executor(), fluid.Scope(), fleet.main_program
        self.exe.run(startup, scope=self.scope)

    def step(self, number: int = 0, times: float = 1.0) -> float:
        """Trains one step; returns the mean of the ranks' losses."""
        x, y = rows(number, times)
        fed = {"x": x, "y": y}
        return float(np.mean(self.exe.run(self.runs, fed, [self.loss], scope=self.scope)[0]))

    def held(self, name: str) -> np.ndarray:
        (found,) = [n for n in self.scope if n == name or n.rpartition("_")[0] == name]
        return np.array(self.scope[found])


def rows(number: int, times: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(number).normal(size=(ROWS, 4)).astype(np.float32)
    return x * np.float32(times), (x[:, :1] + 1) * np.float32(times)


def by_numpy(w: np.ndarray, number: int, scale: float, parts: int) -> tuple[float, np.ndarray]:
    """Returns a step's loss and new weights, with products in float16 on several devices."""
    losses, sums = [], []
    for x, y in zip(*(np.split(each, parts) for each in rows(number)), strict=True):
        x16, w16 = x.astype(np.float16), w.astype(np.float16)
        off = (x16 @ w16).astype(np.float32) - y
        grad = np.float32(2 * scale / ROWS) * off
        losses.append(np.mean(off**2))
        sums.append((x16.T @ grad.astype(np.float16)).astype(np.float32) / np.float32(scale))
    return float(np.mean(losses)), w - np.float32(RATE) * sum(sums)


MODES: dict[str, dict[str, Any]] = {
    "one": {},
    "grad_allreduce": {
        "endpoints": 2,
        "mode": "collective",
        "collective_mode": "grad_allreduce",
    },
    "local_sgd": {"endpoints": 2, "use_local_sgd": True},
    "with_recompute": {"forward_recompute": True, "recompute_checkpoints": ["x"]},
}


@pytest.mark.parametrize("fields", MODES.values(), ids=MODES)
def test_products_are_those_of_numpys_half_precision(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CPU_NUM", "1")
    net = Halves(2.0**10, **fields)
    w, whole = net.held("w"), net.held("w")
    for number in range(4):
        loss, w = by_numpy(w, number, 2.0**10, fields.get("endpoints", 1))
        # Sums within a product may or may not be rounded to float16; a float32 step is 1e-3 away.
        np.testing.assert_allclose(net.step(number), loss, rtol=2e-3)
        x, y = rows(number)
        whole = whole - RATE * 2 / ROWS * x.T @ (x @ whole - y)
        np.testing.assert_allclose(net.held("w"), w, rtol=1e-3, atol=2e-4)
    assert np.abs(net.held("w") - whole).max() > 1e-6


def test_everything_but_products_stays_in_float32() -> None:
    net = Halves(2.0**10)
    halves = {v.name: v for v in net.main.list_vars() if v.dtype == "float16"}
    assert halves
    for op in net.main.global_block().ops:
        names = {*op.input_arg_names, *op.output_arg_names}
        if op.type in {"mul", "mul_grad"}:
            assert names <= halves.keys()
        else:
            assert op.type == "cast" or names.isdisjoint(halves)
    assert net.made[0][-1].type == "update_loss_scaling"
    assert any(op is net.made[0][0] for op in net.main.global_block().ops)


def test_gradients_that_overflow_train_nothing_until_the_scale_has_fallen() -> None:
    net, scale = Halves(2.0**20), 2.0**20
    begun = net.held("w")
    for number in itertools.count():
        net.step(0, times=3.0)
        if net.held("w").tobytes() != begun.tobytes():
            break
        scale = max(scale * 0.8, 1.0) if number % 2 else scale
        np.testing.assert_allclose(net.held("loss_scaling"), scale, rtol=1e-5)
        assert number < 60
    assert scale < 2.0**19
    assert np.isfinite(net.held("w")).all()


def test_the_scale_grows_and_falls_by_its_rule() -> None:
    attrs = {"incr_every_n_steps": 3, "decr_every_n_nan_or_inf": 2, "incr_ratio": 2.0,
             "decr_ratio": 0.8}  # fmt: skip
    bad = [False, False, False, True, False, True, True, True, True, False, False, False]
    wanted = [8, 8, 16, 16, 16, 16, 12.8, 12.8, 10.24, 10.24, 10.24, 20.48]
    held = [np.array([8.0], np.float32), np.array([0], np.int32), np.array([0], np.int32)]
    found = []
    for is_bad in bad:
        made = update_loss_scaling(attrs, np.array([is_bad]), *held)
        held = [np.asarray(x) for x in made]
        found.append(float(held[0][0]))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    last = update_loss_scaling(attrs, np.array([True]), np.array([1.1], np.float32),
                               held[1], np.array([1], np.int32))  # fmt: skip
    assert float(last[0][0]) == 1.0
    most = jnp.array([3e38], jnp.float32)
    grown = update_loss_scaling(attrs, np.array([False]), most, np.array([2], np.int32), held[2])
    assert float(grown[0][0]) == most[0]


class Decorated:
    """A net that `decorate`d SGD trains."""

    def __init__(self, **options: Any) -> None:
        with fresh() as (self.main, startup):
            self.main.random_seed = startup.random_seed = 5
            x, y = fluid.data("x", [None, 4]), fluid.data("y", [None, 1])
            guess = fluid.layers.fc(x, 1, param_attr="w", bias_attr=False)
            self.loss = fluid.layers.mean(fluid.layers.square_error_cost(guess, y))
            self.optimizer = decorate(fluid.optimizer.SGD(RATE), **options)
            self.made = self.optimizer.minimize(self.loss, startup)
        self.exe, self.scope = fluid.Executor(), fluid.Scope()
        self.exe.run(startup, scope=self.scope)

    def step(self, number: int, times: float = 1.0) -> list[np.ndarray]:
        """Trains one step; returns the loss, the scaled loss and the scale."""
        x, y = rows(number, times)
        fetched = [self.loss, self.optimizer.get_scaled_loss(), self.optimizer.get_loss_scaling()]
        return self.exe.run(self.main, {"x": x, "y": y}, fetched, scope=self.scope)

    @property
    def w(self) -> np.ndarray:
        return np.array(self.scope["w"])

    @property
    def halves(self) -> set[str]:
        """The types of operators that compute in float16."""
        ops = self.main.global_block().ops
        wide = {v.name for v in self.main.list_vars() if v.dtype != "float16"}
        return {op.type for op in ops if wide.isdisjoint(op.input_arg_names)} - {"fill_constant"}


@pytest.mark.parametrize("is_dynamic", [True, False])
def test_a_decorated_optimizer_trains_as_numpys_half_precision_does(is_dynamic: bool) -> None:
    net = Decorated(init_loss_scaling=2.0**10, use_dynamic_loss_scaling=is_dynamic)
    assert "_grad" not in str(net.made[0])
    assert [p.name for p, _ in net.made[1]] == ["w"]
    w = net.w
    for number in range(3):
        wanted, w = by_numpy(w, number, 2.0**10, 1)
        loss, scaled, scale = net.step(number)
        np.testing.assert_allclose(loss, wanted, rtol=2e-3)
        np.testing.assert_allclose(scaled, loss * 2.0**10, rtol=1e-6)
        np.testing.assert_allclose(scale, 2.0**10)
        np.testing.assert_allclose(net.w, w, rtol=1e-3, atol=2e-4)


def test_devices_share_what_a_decorated_optimizer_trains() -> None:
    one, two = (Decorated(init_loss_scaling=2.0**10) for _ in range(2))
    with devices(2):
        replicas = fluid.CompiledProgram(two.main).with_data_parallel(two.loss.name)
    for number in range(3):
        one.step(number)
        x, y = rows(number)
        two.exe.run(replicas, {"x": x, "y": y}, [two.loss], scope=two.scope)
    np.testing.assert_allclose(two.w, one.w, rtol=1e-3, atol=2e-4)
    assert np.abs(two.w - Decorated().w).max() > 0.01


def test_the_ratios_of_a_decorated_optimizer_move_its_scale() -> None:
    grows = Decorated(init_loss_scaling=8.0, incr_every_n_steps=1, incr_ratio=4.0)
    assert [float(grows.step(number)[2][0]) for number in range(2)] == [32.0, 128.0]
    falls = Decorated(init_loss_scaling=2.0**40, decr_every_n_nan_or_inf=1, decr_ratio=0.25)
    w = falls.w
    assert float(falls.step(0, times=3.0)[2][0]) == 2.0**38
    np.testing.assert_array_equal(falls.w, w)
    stays = Decorated(init_loss_scaling=2.0**40, use_dynamic_loss_scaling=False)
    assert float(stays.step(0, times=3.0)[2][0]) == 2.0**40
    assert not np.isfinite(stays.w).all()  # as in fluid: no check


def test_lists_say_which_operators_compute_in_float16() -> None:
    assert Decorated().halves == {"mul", "mul_grad", "cast"}
    more = AutoMixedPrecisionLists({"square"})
    assert "square" not in more.black_list
    assert {"square", "mul"} <= Decorated(amp_lists=more).halves
    for lists in (
        AutoMixedPrecisionLists(custom_black_list={"mul"}),
        AutoMixedPrecisionLists(custom_black_varnames={"w"}),
    ):
        assert not Decorated(amp_lists=lists).halves
    with pytest.raises(ValueError, match="Custom white list overlap custom black list: mul"):
        AutoMixedPrecisionLists({"mul"}, {"mul"})


def test_what_a_decorated_optimizer_refuses() -> None:
    with pytest.raises(ValueError, match="decorate: 'decr_ratio' is 0"):
        decorate(fluid.optimizer.SGD(RATE), decr_ratio=0)
    with pytest.raises(TypeError, match="what mixed precision is put around"):
        decorate("SGD")  # type: ignore[arg-type]
    with fresh():
        loss = fluid.layers.mean(fluid.layers.fc(fluid.data("x", [None, 4]), 1))
        decorate(fluid.optimizer.SGD(RATE)).minimize(loss)
        with pytest.raises(PassError, match="scales its loss already"):
            decorate(fluid.optimizer.SGD(RATE)).minimize(loss)


def test_a_scale_that_is_none() -> None:
    with pytest.raises(ValueError, match="amp_loss_scaling is 0"):
        Halves(0.0)
