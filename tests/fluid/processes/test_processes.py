"""Fluid's nccl2 and collective programs train as real processes, which their startup joins.

The oracle is the same programs on as many devices of one process, which other tests compare with
one device. The first run's startup has another seed on each rank, so that only who is given rank
0's parameters trains alike. Four processes sum over groups of two, and over three rings.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.fluid.processes import training
from tests.group.ranks import all_end_well, ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

SCRIPT = Path(training.__file__)
# Sums over the same rows in another order: some units in the last place of float32, times steps.
CLOSE = 5e-6


@pytest.mark.parametrize(("count", "devices", "options"), [(2, 2, ()), (4, 1, ("--by-hand",))])
def test_c183_processes_train_as_devices_of_one(
    tmp_path: Path, count: int, devices: int, options: tuple[str, ...]
) -> None:
    command: list[str | Path] = [SCRIPT, tmp_path, f"--devices={devices}", *options]
    more = {"CPU_NUM": str(devices)}
    with ranks(command, tmp_path, count=count, devices=devices, more=more) as started:
        all_end_well(started)
    endpoints = [f"127.0.0.1:{6170 + rank}" for rank in range(count)]
    for mode in training.MODES:
        wanted = training.train(mode, 0, endpoints, devices=devices, alone=True)
        losses = wanted.pop("losses")
        found = [dict(np.load(tmp_path / f"{mode}-{rank}.npz")) for rank in range(count)]
        each = np.concatenate([one.pop("losses") for one in found], axis=1)
        np.testing.assert_allclose(each, losses, rtol=CLOSE, atol=CLOSE, err_msg=mode)
        for one in found:
            for name, value in wanted.items():
                np.testing.assert_allclose(one[name], value, rtol=CLOSE, atol=CLOSE, err_msg=mode)
                assert one[name].tobytes() == found[0][name].tobytes(), mode
