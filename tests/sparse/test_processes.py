"""Tables of jobs of real processes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.faults.cluster import PATIENT_S, SETTINGS, Jobs

SCRIPT = Path(__file__).with_name("training.py")
# As in test_one_process.py: two trainers' sums are sums of sums.
TOLERANCE = 2e-6


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.grid
@pytest.mark.parametrize("counts", [(2,), (1, 3)], ids=str)
def test_processes_train_the_same_rows_on_any_number_of_servers(
    tmp_path: Path, counts: tuple[int, ...]
) -> None:
    found = []
    for servers in counts:
        with Jobs(
            tmp_path / str(servers),
            servers=servers,
            step_s=60.0,
            lost_s=PATIENT_S,
            script=SCRIPT,
        ) as jobs:
            processes = jobs.all_servers()
            processes += [jobs.trainer(number, "pserver", str(number)) for number in range(2)]
            assert [process.ends() for process in processes] == [0] * (servers + 2)
            first, second = (np.load(jobs.result(number)) for number in range(2))
        for name in ("rows", "w", "losses"):
            assert first[name].tobytes() == second[name].tobytes()
        found.append(first)
    for other in found[1:]:
        for name in ("rows", "w", "losses"):
            assert other[name].tobytes() == found[0][name].tobytes()
    command = [sys.executable, str(SCRIPT), f"--out={tmp_path}", "single", "alone"]
    subprocess.run(command, check=True, env=SETTINGS, timeout=250)
    alone = np.load(tmp_path / "result-alone.npz")
    for name in ("rows", "w", "losses"):
        np.testing.assert_allclose(found[0][name], alone[name], rtol=TOLERANCE, atol=TOLERANCE)
