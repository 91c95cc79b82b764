"""Fluid's nccl2 and collective programs train as real processes, which join in their startup.

The oracle is the same programs on as many devices of one process, which other tests compare with
one device. The first run's startup has another seed on each rank, so results agree only if rank 0's
parameters are broadcast. Four processes have three rings, and request hierarchical sums over as
many ranks as a process has devices, which is found without starting jax.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet.cluster.coordinator import RUNNING
from jaxfleet.observability import merge
from tests.cluster.ranks import all_end_well, ranks
from tests.fluid.processes import training

pytestmark = [pytest.mark.processes, pytest.mark.timeout(500)]

SCRIPT = Path(training.__file__)
# Sums over the same rows in another order: some ULPs of float32, times steps.
CLOSE = 5e-6


@pytest.mark.grid
@pytest.mark.parametrize(("count", "devices", "options"), [(2, 2, ()), (4, 1, ("--by-hand",))])
def test_processes_train_as_devices_of_one_process(
    tmp_path: Path, count: int, devices: int, options: tuple[str, ...]
) -> None:
    command: list[str | Path] = [SCRIPT, tmp_path, f"--devices={devices}", *options]
    more = {"CPU_NUM": str(devices), "JAXFLEET_TRACE_DIR": str(tmp_path / "trace")}
    with ranks(command, tmp_path, count=count, devices=devices, more=more) as started:
        all_end_well(started)
        apart = "was set to other values on rank 1 than on rank 0, and stays so"
        assert [each.text().count(apart) for each in started] == [1] * count
    check_timeline(merge(tmp_path / "trace"), count)
    endpoints = [f"127.0.0.1:{6170 + rank}" for rank in range(count)]
    for mode in training.MODES:
        wanted = training.train(mode, 0, endpoints, devices=devices, alone=True)
        losses = wanted.pop("losses")
        found = [dict(np.load(tmp_path / f"{mode}-{rank}.npz")) for rank in range(count)]
        assert wanted.pop("sums").tolist() == [4, 0, 0]  # one process: a ring, joined by XLA
        for one in found:
            sums, cuts = joined_sums(mode, count), 2 if mode == "fleet" else 0
            assert one.pop("sums").tolist() == [sums, sums, cuts], mode
        each = np.concatenate([one.pop("losses") for one in found], axis=1)
        np.testing.assert_allclose(each, losses, rtol=CLOSE, atol=CLOSE, err_msg=mode)
        for one in found:
            for name, value in wanted.items():
                np.testing.assert_allclose(one[name], value, rtol=CLOSE, atol=CLOSE, err_msg=mode)
                assert one[name].tobytes() == found[0][name].tobytes(), mode


def joined_sums(mode: str, count: int) -> int:
    """Returns the number of sums of small gradients: over processes one for each ring."""
    return 4 if mode == "fleet" else count - 1  # fleet joins none, and recomputes forward


def check_timeline(timeline: dict[str, Any], count: int) -> None:
    """Checks for every rank's steps and its waits."""
    events = timeline["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(names.values()) == [f"rank {rank}" for rank in range(count)]
    spans = [(names[e["pid"]], e["name"]) for e in events if e["ph"] == "X"]
    for rank in names.values():
        assert spans.count((rank, RUNNING)) >= training.STEPS * len(training.MODES)
        assert any(who == rank and what.startswith("wait for all at") for who, what in spans)
