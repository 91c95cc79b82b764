"""A step that is cut, and computes forward again, computes what it computed before."""

import pytest

import jaxfleet as jf
from tests.runtime.comparing import assert_close, distributed, on_one_device, tolerance
from tests.zoo import ZOO, Case

STEPS = 3
NAMES = (  # state in forward, random bits, loops, branches, several optimizers, updates that wait
    *("cnn_batchnorm", "transformer", "scan_over_time", "remat_names", "dropout", "row_keys"),
    *("clipping", "multisteps", "gan", "loss_scaling", "while_loop", "mixed_precision", "ema"),
)


def entries() -> list[object]:
    return [pytest.param(ZOO[name], id=name) for name in NAMES]


@pytest.mark.parametrize("entry", entries())
def test_one_device_computes_the_same(entry: Case) -> None:
    wanted = on_one_device(entry.name, STEPS)
    strategy = jf.DistributedStrategy(mode="single", passes="recompute")
    for number, result in enumerate(distributed(entry.name, STEPS, strategy)):
        # Other executables merge other operators: the last places of sums and products differ.
        assert_close(result, wanted[number], 4 * tolerance(entry), f"after step {number}")


@pytest.mark.parametrize("name", ["cnn_batchnorm", "dropout"])
def test_four_devices_compute_the_same(name: str) -> None:
    wanted = on_one_device(name, STEPS)
    strategy = jf.DistributedStrategy(devices=4, passes="recompute")
    for number, result in enumerate(distributed(name, STEPS, strategy)):
        assert_close(result, wanted[number], 4 * tolerance(ZOO[name]), f"after step {number}")


def test_a_batch_of_another_size_runs_the_same_parts() -> None:
    built = ZOO["mlp"].build(jf.distributed_optimizer)
    example = (built.state, built.batch(0, 16))
    plain = jf.distribute(built.train_step, example, "single")
    cut = jf.distribute(
        built.train_step, example, jf.DistributedStrategy(mode="single", passes="recompute")
    )
    batch = built.batch(0, 24)
    _, wanted = plain(ZOO["mlp"].build(jf.distributed_optimizer).state, batch)
    _, found = cut(ZOO["mlp"].build(jf.distributed_optimizer).state, batch)
    assert float(found) == pytest.approx(float(wanted), rel=1e-6)
