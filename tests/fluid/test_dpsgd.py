"""Dpsgd draws the same on all devices and on servers; `test_optimizer_formulas` has its steps."""

from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid import layers
from tests.fluid.parallel import Trained, batch, devices
from tests.fluid.pserver.jobs import run_alone, run_job

CLOSE: Any = {"rtol": 1e-5, "atol": 1e-6}  # sums over devices have another order


def noisy() -> Any:
    return fluid.optimizer.Dpsgd(0.1, clip=0.5, batch_size=4.0, sigma=2.0)


@pytest.mark.grid
def test_devices_add_the_same_noise_as_one() -> None:
    one, two = Trained(noisy), Trained(noisy)
    with devices(2):
        parallel = two.parallel()
    for step in range(3):
        one.exe.run(one.main, batch(8, step), [one.loss], scope=one.scope)
        parallel.run([], batch(8, step))
    for name, value in one.parameters().items():
        np.testing.assert_allclose(two.parameters()[name], value, **CLOSE)


@pytest.mark.grid
def test_servers_add_the_same_noise_as_one_process() -> None:
    def net() -> fluid.Variable:
        x, y = fluid.data("x", [None, 6]), fluid.data("y", [None, 1], "int64")
        out = layers.fc(x, 3, act="softmax", param_attr="w", bias_attr="b")
        loss = layers.mean(layers.cross_entropy(out, y))
        noisy().minimize(loss)
        return loss

    data = [batch(8, step) for step in range(3)]
    halves = [[{n: v[at : at + 4] for n, v in one.items()} for one in data] for at in (0, 4)]
    job, alone = run_job(net, halves), run_alone(net, data)
    np.testing.assert_allclose(np.mean(job.losses, 0), alone.losses[0], **CLOSE)
