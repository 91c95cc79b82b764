"""Mixed precision of fluid's programs: numpy's half precision, and the rule of the scale."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid.incubate.fleet.base.role_maker import UserDefinedCollectiveRoleMaker
from jaxfleet.fluid.incubate.fleet.collective import Collective, DistributedStrategy
from jaxfleet.ops.fluid.mixed_precision import update_loss_scaling
from tests.fluid.nets import fresh

RATE, ROWS = 0.1, 8


class Halves:
    """A net that is trained by the collective fleet in mixed precision, of one worker or two.

    Args:
        scale: what that of the loss begins with.
        fields: more of the strategy.
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
    """Returns a step's loss and new weights, as products in float16 on some devices make them."""
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
        # Sums within a product may be rounded to float16 or not; a float32 step is 1e-3 away.
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


def test_a_scale_that_is_none() -> None:
    with pytest.raises(ValueError, match="amp_loss_scaling is 0"):
        Halves(0.0)
