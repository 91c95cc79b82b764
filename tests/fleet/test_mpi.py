"""Role makers under a real mpirun, with four ranks on this machine."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet import fleet
from jaxfleet.cluster.roles import MPIRoleMaker
from jaxfleet.cluster.roles.scheduler import drawn_port
from jaxfleet.errors import UnsupportedError
from tests.fleet import jax_script
from tests.fleet.processes import NAMES

SCRIPT = Path(__file__).with_name("roles_script.py")
# The mpirun of mpi4py's MPI, if pip installed both.
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
THERE = importlib.util.find_spec("mpi4py") is not None and MPIRUN is not None
AS_ROOT = {  # required by Open MPI to start four ranks as root on two cores
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
with_mpi = pytest.mark.skipif(not THERE, reason="needs jaxfleet[mpi] and an MPI with mpirun")


def mpirun(*script: str | Path, ranks: int = 4) -> tuple[int, str]:
    """Runs a script on several ranks; returns the exit status and the output."""
    assert MPIRUN is not None
    command = [MPIRUN, "-n", str(ranks), sys.executable, *map(str, script)]
    env = {name: value for name, value in os.environ.items() if name not in NAMES}
    env |= AS_ROOT | {"PYTHONPATH": str(SCRIPT.parents[2]), "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    sys.stdout.write(ended.stdout)
    return ended.returncode, ended.stdout


def answers(output: str) -> list[dict[str, Any]]:
    lines = (line.partition("ANSWERS ")[2] for line in output.splitlines())
    found: list[dict[str, Any]] = [json.loads(line) for line in lines if line]
    return sorted(found, key=lambda each: each["rank"])


@pytest.mark.grid
@with_mpi
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_even_ranks_serve_and_odd_ones_work() -> None:
    status, output = mpirun(SCRIPT, "symmetric")
    assert status == 0
    found = answers(output)
    assert [each["rank"] for each in found] == [0, 1, 2, 3]
    assert [each["server"] for each in found] == [True, False, True, False]
    assert [each["worker"] for each in found] == [False, True, False, True]
    assert [each["first"] for each in found] == [False, True, False, False]
    assert [each["index"] for each in found] == [0, 0, 1, 1]  # integers: fluid's are 0.0 and 1.5
    servers = found[0]["pservers"]
    assert len(set(servers)) == 2  # one machine: fluid's single port would not do
    assert all(int(server.rpartition(":")[2]) >= drawn_port(2) for server in servers)
    for each in found:
        assert (each["workers"], each["servers"], each["size"]) == (2, 2, 4)
        assert type(each["workers"]) is type(each["index"]) is int
        assert each["early"] == "generate_role() should be called first"
        assert each["pservers"] == servers
        assert each["trainers"] == [server.rpartition(":")[0] for server in servers]
        assert each["gathered"] == [0, 1, 2, 3]
        worker = each["worker"]
        assert each["worker_gathered"] == ([1, 3] if worker else None)
        assert (each["sum"], each["max"]) == (([4.0, 1.0], [3]) if worker else ([0.0, 0.0], [0]))
        assert each["text"].startswith(f"role: {1 if worker else 2}, current_id: {each['index']}, ")


@pytest.mark.grid
@with_mpi
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_every_rank_of_a_collective_job_works_and_a_lost_one_is_named() -> None:
    status, output = mpirun(SCRIPT, "absent")
    assert status != 0
    lost = "PeerLostError: barrier_all, gathering 6 of group all: waited 10 s for rank 3"
    assert lost in output
    found = answers(output)
    assert [each["index"] for each in found] == [0, 1, 2, 3]
    assert [each["first"] for each in found] == [True, False, False, False]
    for each in found:
        assert (each["worker"], each["server"]) == (True, False)
        assert (each["workers"], each["servers"], each["pservers"]) == (4, 0, [])
        assert each["trainers"] == found[0]["trainers"]
        assert len(set(each["trainers"])) == 4
        assert (each["gathered"], each["worker_gathered"]) == ([0, 1, 2, 3], [0, 1, 2, 3])
        assert (each["sum"], each["max"]) == ([6.0, 2.0], [3])


@pytest.mark.grid
@with_mpi
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_an_odd_number_of_ranks_are_no_pairs() -> None:
    status, output = mpirun(SCRIPT, "symmetric", ranks=1)
    assert status != 0
    assert "StrategyError: MPISymetricRoleMaker is one of 1 processes, which are no pairs" in output


@pytest.mark.grid
@with_mpi
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_an_error_of_one_rank_ends_the_job() -> None:
    status, output = mpirun(SCRIPT, "failing", ranks=2)
    assert status != 0
    assert "SystemError: of the script" in output
    assert "PeerLostError" not in output  # rank 0 would have waited two minutes for it


@pytest.mark.grid
@with_mpi
@pytest.mark.processes
@pytest.mark.timeout(400)
@pytest.mark.parametrize("role_maker", ["MPISymetricRoleMaker", "MPICollectiveRoleMaker"])
def test_four_ranks_train_as_one_process(role_maker: str, tmp_path: Path) -> None:
    status, output = mpirun(jax_script.__file__, tmp_path, role_maker)
    assert status == 0
    workers = 2 if role_maker == "MPISymetricRoleMaker" else 4
    assert output.count("served") == 4 - workers
    assert output.count(f"sums [{workers}, {sum(range(workers))}]") == workers
    fleet.init()
    alone = tmp_path / "alone"
    alone.mkdir()
    losses, state = jax_script.train(alone)
    with np.load(tmp_path / "seen.npz") as seen:  # the tolerances of test_jax_fleet
        np.testing.assert_allclose(seen["losses"], losses, rtol=1e-4)
        np.testing.assert_allclose(seen["w"], state["w"], rtol=1e-4)


def test_where_mpi4py_is_missing_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UnsupportedError, match="mpi4py cannot be imported") as raised:
        MPIRoleMaker()
    assert raised.value.__notes__ == ["  hint: pip install 'jaxfleet[mpi]'"]
