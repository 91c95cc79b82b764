"""Processes train with tables on servers, in every mode: two trainers, or one as a lone process.

The tolerance is that of the recorded trainings: 1e-4.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.faults.cluster import Jobs, Started, read
from tests.fluid.pserver import relaxed_job, test_distributed_table, test_sparse
from tests.fluid.pserver.jobs import run_alone

SCRIPT = str(Path(relaxed_job.__file__))

pytestmark = pytest.mark.processes


def run(folder: Path, trainers: int) -> list[dict[str, np.ndarray]]:
    def start(jobs: Jobs, role: str, number: int) -> Started:
        options = [f"--out={folder}", f"--number={number}"]
        cluster = jobs.cluster(
            role=role,
            trainer_id=number if role == "trainer" else None,
            current_endpoint=jobs.endpoints[number] if role == "pserver" else None,
        )
        return jobs.start(f"{role} {number}", [sys.executable, SCRIPT, *options], cluster)

    with Jobs(folder, servers=2 * len(relaxed_job.BUILDS), trainers=trainers) as jobs:
        started = [start(jobs, "pserver", n) for n in range(2)]
        started += [start(jobs, "trainer", n) for n in range(trainers)]
        assert {one.ends(timeout_s=100.0) for one in started} == {0}
    return [read(folder / f"trainer{n}.npz") for n in range(trainers)]


@pytest.mark.grid
def test_one_trainer_trains_as_one_process_in_every_mode(tmp_path: Path) -> None:
    (seen,) = run(tmp_path, 1)
    alone = run_alone(partial(test_sparse.net, is_sparse=False), relaxed_job.FED).losses[0]
    for mode in ("sync", "async", "half_async", "geo"):
        np.testing.assert_allclose(seen[mode], alone, rtol=1e-4, err_msg=mode)
    dense = partial(test_distributed_table.net, distributed=False)
    wanted = run_alone(dense, relaxed_job.DISTRIBUTED).losses[0]
    np.testing.assert_allclose(seen["distributed"], wanted, rtol=1e-4)


@pytest.mark.grid
def test_two_trainers_train_together_in_every_mode(tmp_path: Path) -> None:
    seen = run(tmp_path, 2)
    alone = run_alone(partial(test_sparse.net, is_sparse=False), relaxed_job.FED).losses[0]
    np.testing.assert_allclose(np.mean([one["sync"] for one in seen], 0), alone, rtol=1e-4)
    assert all(np.isfinite(losses).all() for one in seen for losses in one.values())
