"""Downpour jobs of several workers and servers, over a network in memory."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.contrib.downpour.worker import tables_of
from jaxfleet.errors import ProgramError
from jaxfleet.fluid.distributed import DownpourJob
from tests.contrib.downpour.jobs import FAR, KEYS, dataset, files
from tests.contrib.downpour.test_training import Job
from tests.fluid.pserver.memory import Job as Network
from tests.tiers import by_default

ENDPOINTS = [f"127.0.0.1:{7301 + number}" for number in range(3)]


def job_of(network: Network, servers: int, workers: int, staleness: int | None) -> DownpourJob:
    return DownpourJob(ENDPOINTS[:servers], workers, network.connections(), staleness)


def serve(
    network: Network, made: Job, number: int, servers: int, workers: int, *, staleness: int | None
) -> None:
    job_of(network, servers, workers, staleness).serve([made.main], ENDPOINTS[number])


def work(
    network: Network,
    made: Job,
    number: int,
    servers: int,
    paths: list[list[str]],
    *,
    staleness: int | None,
) -> dict[str, np.ndarray]:
    job = job_of(network, servers, len(paths), staleness)
    job.connect([made.main], number)
    for _ in range(2):
        made.train(paths[number], batch=4)
    found = {name: made.value(name) for name in ("w", "b", "norm.batch_size", "norm.batch_sum")}
    found["rows"] = np.array(tables_of(made.main).look_up("emb", FAR + np.arange(KEYS)))
    job.stop()
    return found


def run(
    servers: int, paths: list[list[str]], *, staleness: int | None = None, **more: Any
) -> list[dict[str, np.ndarray]]:
    """Runs a job; each worker trains on its own files."""
    network, people = Network(), dict[str, Any]()
    for n in range(servers):
        made = Job(data_norm=True, **more)
        people[f"server {n}"] = partial(
            serve, network, made, n, servers, len(paths), staleness=staleness
        )
    for n in range(len(paths)):
        made = Job(data_norm=True, **more)
        people[f"worker {n}"] = partial(work, network, made, n, servers, paths, staleness=staleness)
    done = network.run(people)
    return [done[f"worker {n}"] for n in range(len(paths))]


@pytest.mark.grid
def test_a_worker_over_servers_trains_as_in_one_process(tmp_path: Path) -> None:
    paths, alone = files(tmp_path, 18), Job(data_norm=True)
    for _ in range(2):
        alone.train(paths, batch=4)
    (served,) = run(2, [paths])
    # Servers keep increments of parameters apart from their initial values.
    np.testing.assert_allclose(served["rows"], alone.rows(), rtol=1e-4, atol=1e-6)
    for name in ("w", "b", "norm.batch_sum"):
        np.testing.assert_allclose(served[name], alone.value(name), rtol=1e-4, atol=1e-5)


@pytest.mark.grid
def test_two_workers_end_with_the_same_tables_whatever_the_number_of_servers(
    tmp_path: Path,
) -> None:
    paths = [files(tmp_path, 16, seed=seed) for seed in (0, 1)]
    first, second = run(2, paths)
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)
    (other, _) = run(1, paths)
    for name, value in first.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


@pytest.mark.parametrize("window", by_default([1, 3], 1))
def test_a_worker_that_waits_for_nobody_trains_as_in_lockstep_when_it_is_alone(
    tmp_path: Path, window: int
) -> None:
    paths = files(tmp_path, 18)
    (relaxed,) = run(2, [paths], staleness=-1, window=window)
    (lockstep,) = run(2, [paths], window=window)
    for name, value in lockstep.items():
        np.testing.assert_array_equal(relaxed[name], value, err_msg=name)


@pytest.mark.parametrize("staleness", by_default([-1, 0, 2], 0))
def test_of_workers_that_wait_for_nobody_no_push_is_lost(tmp_path: Path, staleness: int) -> None:
    paths = [files(tmp_path, count, seed=seed) for seed, count in ((0, 16), (1, 32))]
    found = run(2, paths, staleness=staleness)
    # Samples are counted, and the last worker sees all: 48, twice, plus the initial 10000.
    counted = max(float(worker["norm.batch_size"][0]) for worker in found)
    assert counted == pytest.approx(10_096, abs=0.5)  # a millionth of it decays at each push
    assert all(np.isfinite(worker["rows"]).all() for worker in found)


def test_a_job_is_asked_for_what_it_has(tmp_path: Path) -> None:
    made, other = Job(), Job()
    job = DownpourJob(["a:1"], 2)
    with pytest.raises(ProgramError, match="'b:1' is not a server of the job"):
        job.serve([made.main], "b:1")
    with pytest.raises(ProgramError, match="worker_id is 2"):
        job.connect([made.main], 2)
    with pytest.raises(ProgramError, match="programs of several jobs"):
        job.serve([made.main, other.main], "a:1")
    with pytest.raises(ProgramError, match="is of no Downpour job"):
        job.connect([fluid.Program()], 0)
    assert dataset(made.fed, files(tmp_path, 1), 1)  # the job's own is unchanged
