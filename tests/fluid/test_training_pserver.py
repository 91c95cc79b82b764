"""Two trainers and two servers, as processes, have the losses of fluid 1.8.5's, run for run.

The tolerance is that of the recorded cases, as in `test_training.py`.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.cluster import Jobs, Started, read
from tests.fluid.pserver import training_job
from tests.fluid.recorded import cases

CASES: list[dict[str, Any]] = cases("training_cases")["cases"]
SCRIPT = str(Path(training_job.__file__))

pytestmark = pytest.mark.processes


def start(jobs: Jobs, role: str, number: int) -> Started:
    """Starts one of the processes, each of which trains by every optimizer."""
    names = [case["optimizer"] for case in CASES]
    options = [f"--out={jobs.folder}", f"--number={number}", "--optimizers", *names]
    who = {"role": role, "trainer_id": number if role == "trainer" else None}
    here = jobs.endpoints[number] if role == "pserver" else None
    cluster = jobs.cluster(**who, current_endpoint=here)
    return jobs.start(f"{role} {number}", [sys.executable, SCRIPT, *options], cluster)


@pytest.mark.grid
def test_processes_train_as_fluids_did(tmp_path: Path) -> None:
    with Jobs(tmp_path, servers=2 * len(CASES)) as jobs:
        started = [start(jobs, role, n) for role in ("pserver", "trainer") for n in range(2)]
        assert [one.ends(timeout_s=100.0) for one in started] == [0, 0, 0, 0]
    for trainer in range(2):
        seen = read(tmp_path / f"trainer{trainer}.npz")
        for case in CASES:
            name, wanted = case["optimizer"], case["pserver_sync"][trainer]
            losses = seen[f"{name} losses"]
            np.testing.assert_allclose(losses, wanted["losses"], rtol=1e-4, err_msg=name)
            for param, values in wanted["final"].items():
                found = seen[f"{name} {param}"].reshape(-1)[: len(values)]
                what = f"{name} {param}"
                np.testing.assert_allclose(found, values, rtol=1e-3, atol=1e-5, err_msg=what)
