"""Processes of a job that tests start concurrently."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST_S = 300.0
# Variables that specify this process's role: not meant for children.
NAMES = (
    *("TRAINING_ROLE", "PADDLE_TRAINING_ROLE", "PADDLE_TRAINER_ID", "PADDLE_PSERVER_ID"),
    *("PADDLE_CURRENT_ENDPOINT", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_PSERVERS_IP_PORT_LIST"),
    *("PADDLE_TRAINERS_NUM", "POD_IP", "PADDLE_PORT", "JAXFLEET_MEETING_DIR"),
    *("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    *("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE", "KUBERNETES_SERVICE_HOST"),
)


def outputs_of(
    command: Sequence[str], environments: Sequence[Mapping[str, str]], folder: Path
) -> list[str]:
    """Runs a command once for each environment; returns the outputs; all must succeed."""
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    clean |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    logs = [folder / f"process{at}.txt" for at in range(len(environments))]
    processes = []
    try:
        for environment, log in zip(environments, logs, strict=True):
            with log.open("wb") as output:
                started = subprocess.Popen(
                    [sys.executable, *command],
                    env={**clean, **environment},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            processes.append(started)
        until = time.monotonic() + LONGEST_S
        statuses = [each.wait(max(0.1, until - time.monotonic())) for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.wait()
        outputs = [log.read_text() for log in logs if log.exists()]
        sys.stdout.write("\n----\n".join(outputs))
    assert statuses == [0] * len(processes)
    return outputs
