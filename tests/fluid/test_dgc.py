"""DGCMomentumOptimizer trains by the largest elements of each device's accumulated gradient."""

from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import UnsupportedError
from tests.fluid.nets import fresh
from tests.tiers import grid

ROWS, WIDTH, RATE, KEEP = 4, 128, 0.5, 0.9
SPARSITY = [0.75, 0.9]
BEGIN, RAMP = 1, 2


def built(**options: Any) -> tuple[fluid.Program, fluid.Program, fluid.Variable]:
    """Returns programs of a matrix of 16384 elements and a bias, which is not compressed."""
    with fresh() as (main, startup):
        x, y = fluid.data("x", [None, WIDTH]), fluid.data("y", [None, WIDTH])
        out = fluid.layers.fc(x, WIDTH, param_attr="w", bias_attr="b")
        loss = fluid.layers.mean(fluid.layers.square_error_cost(out, y))
        made = fluid.optimizer.DGCMomentumOptimizer(RATE, KEEP, BEGIN, RAMP, SPARSITY, **options)
        made.minimize(loss)
    return main, startup, loss


def batches(count: int) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(5)
    return [
        {n: random.normal(size=(ROWS, WIDTH)).astype(np.float32) for n in ("x", "y")}
        for _ in range(count)
    ]


def by_hand(
    w: np.ndarray, b: np.ndarray, feeds: list[dict[str, np.ndarray]], devices: int, *, ahead: bool
) -> np.ndarray:
    """Returns the matrix after one step for each feed, by the paper's formula."""
    u, v = np.zeros((devices, *w.shape)), np.zeros((devices, *w.shape))
    velocity, of_bias = np.zeros_like(w), np.zeros_like(b)
    for step, feed in enumerate(feeds):
        parts, gradients = np.array_split(np.arange(ROWS), devices), []
        total_b = np.zeros_like(b)
        for device, rows in enumerate(parts):
            x, y = feed["x"][rows].astype(float), feed["y"][rows].astype(float)
            error = 2 * (x @ w + b - y) / (len(rows) * WIDTH) / devices
            gradient = x.T @ error
            total_b += error.sum(0)
            if step >= BEGIN:
                part = SPARSITY[min(int((step - BEGIN) * len(SPARSITY) / RAMP), 1)]
                moved = KEEP * (u[device] + gradient) if ahead else KEEP * u[device] + gradient
                summed = v[device] + moved + (gradient if ahead else 0)
                count = int(w.size * (1 - part))
                kept = np.abs(summed) >= np.sort(np.abs(summed).ravel())[-count]
                u[device], v[device] = np.where(kept, 0, moved), np.where(kept, 0, summed)
                gradient = np.where(kept, summed, 0)
            gradients.append(gradient)
        gradient = sum(gradients)
        if step < BEGIN:
            velocity = KEEP * velocity + gradient
            w = w - RATE * (gradient + KEEP * velocity if ahead else velocity)
        else:
            w = w - RATE * gradient
        of_bias = KEEP * of_bias + total_b
        b = b - RATE * (total_b + KEEP * of_bias if ahead else of_bias)
    return w


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("devices", [grid(1), 2])
def test_each_device_sends_its_largest_elements_and_keeps_the_others(
    devices: int, ahead: bool
) -> None:
    main, startup, loss = built(use_nesterov=ahead)
    scope, exe = fluid.Scope(), fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    w, b = (np.array(scope.find_var(n).get_tensor()).astype(float) for n in ("w", "b"))  # type: ignore[union-attr]
    places = fluid.cpu_places(devices)
    runs: Any = fluid.CompiledProgram(main).with_data_parallel(loss.name, places=places)
    feeds = batches(4)
    for feed in feeds:
        exe.run(runs, feed=feed, fetch_list=[loss], scope=scope)
    found = np.array(scope.find_var("w").get_tensor())  # type: ignore[union-attr]
    wanted = by_hand(w, b, feeds, devices, ahead=ahead)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def test_a_small_parameter_is_trained_by_plain_momentum() -> None:
    main, _, _ = built()
    kinds = {op.input("Param")[0]: op.type for op in main.global_block().ops if op.input("Param")}
    assert kinds == {"w": "dgc_momentum", "b": "momentum"}


def test_gradients_are_clipped_before_they_are_compressed() -> None:
    clip = fluid.clip.GradientClipByNorm(1.0)
    main, _, _ = built(grad_clip=clip, num_trainers=4)
    ops = main.global_block().ops
    types = [op.type for op in ops]
    assert types.index("dgc_clip_by_norm") == types.index("dgc") - 1
    assert ops[types.index("dgc_clip_by_norm")].attr("max_norm") == 0.5
    assert types.count("clip_by_norm") == 1  # of the bias
    with pytest.raises(TypeError, match="num_trainers is None, and grad_clip is given"):
        built(grad_clip=clip)
    with pytest.raises(TypeError, match="grad_clip of DGCMomentumOptimizer"):
        built(grad_clip=fluid.clip.GradientClipByValue(1.0), num_trainers=2)


def test_servers_exchange_no_compressed_gradients() -> None:
    main, startup, _ = built()
    with pytest.raises(UnsupportedError, match="DGCMomentumOptimizer trains over collectives"):
        fluid.DistributeTranspiler().transpile(0, main, "a:1", 1, startup_program=startup)


def test_stages_on_several_devices_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="no mode here runs stages of one program"):
        fluid.optimizer.PipelineOptimizer(fluid.optimizer.SGD(0.1))
