"""Roles from a cluster, as jax detects it."""

import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from jax._src.clusters.k8s_cluster import K8sCluster  # the fake has no other home

from jaxfleet.cluster.roles import ClusterRoleMaker, scheduler
from jaxfleet.env import Rank
from jaxfleet.errors import StrategyError
from tests.fleet.processes import NAMES, outputs_of

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[001-002]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
# A fluid script that does not specify its processes: the cluster does.
SCRIPT = """
import numpy as np
from jaxfleet import fluid
from jaxfleet.fluid.incubate.fleet.collective import DistributedStrategy, fleet

fleet.init()
x, strategy = fluid.data("x", [None, 1]), DistributedStrategy()
strategy.use_local_sgd = True
loss = fluid.layers.mean(fluid.layers.fc(x, 1, param_attr="w", bias_attr=False))
fleet.distributed_optimizer(fluid.optimizer.SGD(1.0), strategy).minimize(loss)
exe = fluid.Executor()
exe.run(fleet.startup_program)
before = float(np.asarray(fluid.global_scope()["w"])[0, 0])
exe.run(fleet.main_program, feed={"x": np.full((2, 1), fleet.worker_index() + 1.5, np.float32)})
moved = round(before - float(np.asarray(fluid.global_scope()["w"])[0, 0]), 3)
total = [0.0]
fleet.all_reduce_worker([fleet.worker_index() + 1.5], total)
fleet.barrier_worker()
role = fleet.role_maker
role.barrier_all()
print("GATHERED", role.all_gather((role.worker_index(), role.worker_num(), total, moved)))
"""


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Removes this process from any cluster."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_task_of_slurm_is_a_worker(nowhere: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        nowhere.setenv(name, value)
    role = ClusterRoleMaker()
    role.generate_role()
    assert (role.is_worker(), role.is_server(), role.is_first_worker()) == (True, False, False)
    assert (role.worker_num(), role.worker_index()) == (2, 1)
    assert role.get_trainer_endpoints() == ["node001:61441", ""]  # jax's port of this job
    assert role.get_pserver_endpoints() == []


def test_a_pod_of_a_jobset_is_a_worker(nowhere: pytest.MonkeyPatch) -> None:
    kubernetes = ModuleType("kubernetes")
    client = SimpleNamespace(
        CoreV1Api=object, BatchV1Api=object, exceptions=SimpleNamespace(ApiException=OSError)
    )
    kubernetes.__dict__.update(
        config=SimpleNamespace(load_incluster_config=lambda: None), client=client
    )
    nowhere.setitem(sys.modules, "kubernetes", kubernetes)
    labels = {"jobset.sigs.k8s.io/jobset-name": "train"}
    job = SimpleNamespace(
        metadata=SimpleNamespace(name="train-workers-0", labels=labels),
        spec=SimpleNamespace(parallelism=3),
    )
    for name, value in {
        "_pod": None,
        "_job": job,
        "_controller": SimpleNamespace(kind="Job"),
    }.items():
        nowhere.setattr(K8sCluster, name, classmethod(lambda _, value=value: value))
    nowhere.setattr(socket, "gethostbyname", lambda _: "10.0.0.1")
    nowhere.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.9")
    nowhere.setenv("JOB_COMPLETION_INDEX", "2")
    role = ClusterRoleMaker()
    assert (role.worker_num(), role.worker_index(), role.is_worker()) == (3, 2, True)
    assert role.get_trainer_endpoints() == ["train-workers-0-0.train:55527", "", ""]


def test_no_cluster_is_said(nowhere: pytest.MonkeyPatch) -> None:
    with pytest.raises(StrategyError, match="no environment identifies this process: SLURM"):
        ClusterRoleMaker().is_worker()
    with pytest.raises(StrategyError, match="2 servers and their trainers have no folder"):
        ClusterRoleMaker(2)
    for name, value in SLURM.items():
        nowhere.setenv(name, value)
    with pytest.raises(StrategyError, match="the cluster started 2 processes, and 2 are to serve"):
        ClusterRoleMaker(2, "folder").is_worker()


def test_the_first_processes_serve(nowhere: pytest.MonkeyPatch, tmp_path: Path) -> None:
    left = list(range(4))

    def next_rank(connect_s: float) -> Rank:
        assert connect_s == 60
        return Rank(left.pop(0), ("node001:61441", "", "", ""), "job")

    nowhere.setattr(scheduler, "detected_rank", next_rank)

    def asked(_: int) -> Any:
        role = ClusterRoleMaker(2, str(tmp_path), init_timeout_seconds=60, run_timeout_seconds=60)
        role.generate_role()
        role.generate_role()
        role.barrier_all()
        index = role.server_index() if role.is_server() else role.worker_index()
        asked = role.all_gather((role.is_server(), index))
        return role.worker_num(), role.get_pserver_endpoints(), asked

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(asked, range(4)))
    assert all(answer == answers[0] for answer in answers)
    workers, servers, gathered = answers[0]
    assert workers == 2
    assert len(set(servers)) == 2
    assert gathered == [(False, 0), (False, 1), (True, 0), (True, 1)]


@pytest.mark.grid
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_tasks_of_slurm_train_together_and_meet_over_the_lines_of_their_group(
    tmp_path: Path,
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = str(held.getsockname()[1])
    here = SLURM | {"SLURM_STEP_NODELIST": "localhost", "JAX_COORDINATOR_PORT": port}
    tasks = [here | {"SLURM_PROCID": str(at), "SLURM_LOCALID": str(at)} for at in range(2)]
    outputs = outputs_of(["-c", SCRIPT], tasks, tmp_path)
    met = "GATHERED [(0, 2, [4.0], 2.0), (1, 2, [4.0], 2.0)]"  # with the mean of both ranks' rows
    assert all(met in output for output in outputs)
