"""`jf.fleet`: a JAX script gets its role from one object: alone, with servers, or as a rank."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.cluster import RankPlace
from jaxfleet.cluster.roles import Role, UserDefinedCollectiveRoleMaker, UserDefinedRoleMaker
from jaxfleet.errors import CaptureError
from jaxfleet.fleet import JobFleet
from tests.fleet import jax_script

LONGEST_S = 200.0
JOBS: Mapping[str, Sequence[str]] = {
    "servers": ["--servers", "1", "--trainers", "2", "--servers-run-script"],
    "ranks": ["--nproc", "2"],
}


@pytest.mark.grid
@pytest.mark.processes
@pytest.mark.timeout(500)
@pytest.mark.parametrize("job", ["servers", pytest.param("ranks", marks=pytest.mark.grid)])
def test_a_script_goes_as_alone(job: str, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "jaxfleet", "launch", *JOBS[job]]
    done = subprocess.run(
        [*launch, str(Path(jax_script.__file__)), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    print(done.stdout)  # noqa: T201  # of what failed
    assert done.returncode == 0
    assert "worker 0 of 2: ['a', 'b']" in done.stdout
    assert "worker 1 of 2: ['c']" in done.stdout
    assert done.stdout.count("sums [2, 1]") == 2
    assert ("served" in done.stdout) == (job == "servers")
    jf.fleet.init()
    alone = tmp_path / "alone"
    alone.mkdir()
    losses, state = jax_script.train(alone)
    with np.load(tmp_path / "seen.npz") as seen:
        np.testing.assert_allclose(seen["losses"], losses, rtol=1e-4)
        np.testing.assert_allclose(seen["w"], state["w"], rtol=1e-4)


def test_who_trains_alone_needs_no_environment() -> None:
    fleet = JobFleet()
    fleet.init()
    assert (fleet.worker_index(), fleet.worker_num(), fleet.server_num()) == (0, 1, 0)
    assert (fleet.is_worker(), fleet.is_server(), fleet.is_first_worker()) == (True, False, True)
    assert fleet.worker_endpoints(to_string=True) == ""  # text, not a list
    fleet.barrier_worker()
    total = np.zeros(2)
    fleet.all_reduce_worker(np.ones(2), total)
    assert total.tolist() == [1.0, 1.0]
    fleet.stop_worker()


def mode_of(fleet: JobFleet) -> str:
    return fleet.strategy.mode


def test_a_strategy_is_kept_for_the_step() -> None:
    fleet = JobFleet()
    with pytest.raises(ValueError, match="the role of this process is not set"):
        fleet.distributed_optimizer(optax.sgd(0.1))
    fleet.init()
    with pytest.raises(ValueError, match="the step has no strategy yet"):
        fleet.distribute(lambda state, batch: (state, batch), (jnp.ones(1), jnp.ones(1)))
    with pytest.raises(ValueError, match="there is no step yet"):
        fleet.save("nowhere", {})
    fleet.distributed_optimizer(optax.sgd(0.1))
    assert mode_of(fleet) == "collective"
    fleet.distributed_optimizer(optax.sgd(0.1), jf.DistributedStrategy(mode="single"))
    assert mode_of(fleet) == "single"
    with pytest.raises(ValueError, match="mode is 'nccl2'"):
        fleet.distributed_optimizer(optax.sgd(0.1), "nccl2")
    with pytest.raises(CaptureError, match="is not an optimizer"):
        fleet.distributed_optimizer("adam")  # type: ignore[arg-type]  # the tested mistake
    with pytest.raises(TypeError, match="role_maker must be an instance"):
        fleet.init("worker")  # type: ignore[arg-type]  # as that


def test_a_job_with_servers_is_what_the_role_maker_says() -> None:
    fleet, at = JobFleet(), ["127.0.0.1:6174", "127.0.0.1:6175"]
    fleet.init(UserDefinedRoleMaker(1, Role.WORKER, 3, at))
    fleet.distributed_optimizer(optax.sgd(0.1))
    assert mode_of(fleet) == "pserver"
    cluster = fleet._cluster()  # noqa: SLF001  # nothing is connected to before a step
    assert (cluster.role, cluster.trainer_id, cluster.trainers) == ("trainer", 1, 3)
    assert cluster.endpoints == tuple(at)
    with pytest.raises(ValueError, match="is a worker, and serves nothing"):
        fleet.run_server()
    fleet.init(UserDefinedRoleMaker(1, Role.SERVER, 3, at))
    served = fleet._cluster()  # noqa: SLF001  # as that
    assert (served.role, served.trainer_id, served.server_id) == ("pserver", None, 1)
    fleet.init()
    fleet.distributed_optimizer(optax.sgd(0.1), "pserver")
    with pytest.raises(ValueError, match="needs servers, and this job has none"):
        fleet.distribute(lambda state, batch: (state, batch), (jnp.ones(1), jnp.ones(1)))


def test_who_trains_apart_from_the_others_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, at = JobFleet(), ["127.0.0.1:6174"]
    fleet.init(UserDefinedRoleMaker(1, Role.WORKER, 3, at))
    fleet.distributed_optimizer(optax.sgd(0.1), "collective")
    with pytest.raises(ValueError, match="mode 'collective' in a job with 1 servers"):
        fleet.distribute(lambda state, batch: (state, batch), (jnp.ones(1), jnp.ones(1)))
    for name in ("jaxfleet.fleet.job.joined", "jaxfleet.cluster.roles.base.joined"):
        monkeypatch.setattr(name, lambda: RankPlace(0, 2))
    monkeypatch.setattr("jaxfleet.fleet.job.initialize", lambda _: RankPlace(0, 2))
    fleet.init(UserDefinedCollectiveRoleMaker(0, ["a:1", "b:1"]))
    for number, all_ in ((1, ["a:1", "b:1"]), (0, ["a:1"]), (0, ["a:1", "b:1", "c:1"])):
        said = f"the role maker says rank {number} of {len(all_)}, and this process is rank 0 of 2"
        with pytest.raises(ValueError, match=said):
            fleet.init(UserDefinedCollectiveRoleMaker(number, all_))
