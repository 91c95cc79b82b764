"""pslib's fleet: jobs over a network in memory, and rejections."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.contrib.downpour.worker import tables_of
from jaxfleet.errors import CheckpointError
from jaxfleet.fluid.incubate.fleet.base.role_maker import Role, UserDefinedRoleMaker
from jaxfleet.fluid.incubate.fleet.parameter_server.pslib import PSLib
from tests.contrib.downpour.jobs import FAR, KEYS, ctr, dataset, files
from tests.contrib.downpour.test_training import STRATEGY
from tests.fluid.nets import fresh
from tests.fluid.pserver.memory import Job as Network

SERVERS = [f"127.0.0.1:{7501 + number}" for number in range(2)]
SPARSE, DENSE, COUNTS = 0, 1, 2  # tables


class Process:
    """A process of a job: its fleet, its program, its own scope."""

    def __init__(self, network: Network, role: Any, **strategy: Any) -> None:
        self.fleet = PSLib()
        self.fleet.init(role)
        self.fleet.executor._pserver.connections = network.connections()
        with fresh() as (self.main, startup):
            self.main.random_seed = startup.random_seed = 5
            loss, _, self.fed = ctr(4, data_norm=strategy.pop("data_norm", True))
            optimizer = self.fleet.distributed_optimizer(
                fluid.optimizer.Adam(), {**STRATEGY, **strategy}
            )
            optimizer.minimize(loss, startup_programs=startup)
        self.scope, self.exe = fluid.Scope(), fluid.Executor()
        self.exe.run(startup, scope=self.scope)

    def begin(self) -> None:
        with fluid.scope_guard(self.scope):
            self.fleet.init_worker()

    def train(self, paths: list[str]) -> None:
        self.exe.train_from_dataset(self.main, dataset(self.fed, paths, 4), self.scope)

    def seen(self) -> dict[str, np.ndarray]:
        """Returns rows, and the parameters of servers."""
        tables = tables_of(self.main)
        names = ("norm.batch_size", "norm.batch_square_sum", "norm.batch_sum")
        shapes = {name: self.main.global_block().var(name).shape for name in names}
        dense = {n: self.main.global_block().var(n).shape for n in ("b", "w")}
        found = {**tables.pull_dense(DENSE, dense), **tables.pull_dense(COUNTS, shapes)}
        found["rows"] = tables.look_up("emb", FAR + np.arange(KEYS))
        return {name: np.array(value) for name, value in found.items()}


def run(
    work: Callable[[Process, int], Any], *, workers: int = 1, servers: int = 2, **more: Any
) -> list[Any]:
    network, people, at = Network(), dict[str, Any](), SERVERS[:servers]
    folder = more.pop("model_dir", None)
    for n in range(servers):
        server = Process(network, UserDefinedRoleMaker(n, Role.SERVER, workers, at), **more)
        server.fleet.init_server(folder)
        people[f"server {n}"] = server.fleet.run_server
    for n in range(workers):
        role = UserDefinedRoleMaker(n, Role.WORKER, workers, at)
        people[f"worker {n}"] = partial(work, Process(network, role, **more), n)
    done = network.run(people)
    return [done[f"worker {n}"] for n in range(workers)]


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.grid
@pytest.mark.parametrize("staleness", [None, -1])
def test_a_job_saves_goes_on_and_goes_back_and_another_goes_on_from_it(
    tmp_path: Path, staleness: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    more = 16 if staleness is None else 24  # in lockstep workers have as many batches
    paths = [files(tmp_path, count, seed=seed) for seed, count in ((0, 16), (1, more))]
    kept, one = str(tmp_path / "kept"), str(tmp_path / "one")

    def work(process: Process, number: int) -> Any:
        fleet = process.fleet
        process.begin()
        fleet.save_one_table(DENSE, one)
        process.train(paths[number])
        fleet.barrier_worker()
        fleet.save_persistables(process.exe, kept)
        at_save = process.seen()
        fleet.barrier_worker()
        process.train(paths[number])
        fleet.barrier_worker()
        later = process.seen()
        fleet.print_table_stat(SPARSE)
        fleet.load_model(kept)
        back = process.seen()
        fleet.load_one_table(DENSE, one)
        first = process.seen()["w"]
        fleet.clear_one_table(SPARSE)
        fleet.print_table_stat(SPARSE)
        fleet.clear_model()
        empty = process.seen()["w"]
        fleet.barrier_worker()
        fleet.stop_worker()
        fleet.stop_worker()
        return at_save, later, back, first, empty, np.array(process.scope["w"])

    for at_save, later, back, first, empty, _ in run(work, workers=2, staleness=staleness):
        same(back, at_save)
        assert not np.array_equal(later["rows"], at_save["rows"])
        assert not np.array_equal(later["w"], at_save["w"])
        assert not np.array_equal(first, at_save["w"])
        assert np.any(first)
        assert not np.any(empty)
    shown = capsys.readouterr().out
    assert f"table {SPARSE}, 'emb': {KEYS} rows" in shown
    assert f"table {SPARSE}, 'emb': 0 rows" in shown

    def go_on(process: Process, number: int) -> Any:
        process.begin()
        found = process.seen()
        process.train(paths[number])
        process.fleet.stop_worker()
        return found

    (found,) = run(go_on, servers=1, staleness=staleness, model_dir=kept)
    same(found, at_save)


@pytest.mark.grid
def test_a_worker_of_the_fleet_trains_as_one_process_without_servers(tmp_path: Path) -> None:
    paths = files(tmp_path, 18)

    def work(process: Process, _: int) -> Any:
        process.begin()
        process.train(paths)
        found = process.seen()
        process.fleet.stop_worker()
        return found

    (served,) = run(work)
    alone = Process(Network(), None)
    assert alone.main._fleet_opt["mpi_size"] == 1
    alone.begin()
    alone.train(paths)
    for name, value in alone.seen().items():
        np.testing.assert_allclose(served[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    with pytest.raises(ValueError, match="not a worker of a job with servers"):
        alone.fleet.save_persistables(alone.exe, str(tmp_path))
    alone.fleet.stop_worker()


def test_sums_lose_the_shows_that_have_decayed() -> None:
    def work(process: Process, _: int) -> Any:
        process.begin()
        before = process.seen()
        process.fleet.shrink_dense_table(0.5, emb_dim=4)
        after = process.seen()
        process.fleet.shrink_dense_table(0.5, emb_dim=4, table_id=DENSE)
        again = process.seen()
        process.fleet.shrink_sparse_table()
        process.fleet.stop_worker()
        return before, after, again

    for before, after, again in run(work, workers=2):
        change = np.zeros_like(before["norm.batch_sum"])
        change[::4] = before["norm.batch_size"][::4] * np.log(0.5)
        np.testing.assert_allclose(
            after["norm.batch_sum"], before["norm.batch_sum"] + change, rtol=1e-5
        )
        for name in ("norm.batch_size", "w"):
            np.testing.assert_array_equal(after[name], before[name])
        same(again, after)


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_of_a_low_score_go_and_their_counts_with_them(tmp_path: Path, workers: int) -> None:
    paths = [files(tmp_path, count, seed=seed) for seed, count in ((0, 12), (1, 16))]
    rule = {"sparse_delete_threshold": 0.33, "sparse_show_click_decay_rate": 0.5}
    keys = FAR + np.arange(KEYS)

    def work(process: Process, number: int) -> Any:
        process.begin()
        process.train(paths[number])
        tables = tables_of(process.main)
        if not workers:
            counts = tables.look_up("emb.shown", keys)
            stores = tables._sparse  # type: ignore[attr-defined]  # of one process
            for name in ("emb", "emb.shown"):
                stores[name].shrink(100)
            return counts, {name: len(stores[name]) for name in ("emb", "emb.shown")}
        process.fleet.barrier_worker()
        counts = tables.look_up("emb.shown", keys)
        process.fleet.shrink_sparse_table()
        figures = process.fleet._tending.tables.stats()
        process.fleet.stop_worker()
        return counts, {name: figures[name]["rows"] for name in ("emb", "emb.shown")}

    strategy: dict[str, Any] = {"use_cvm": True, "emb": rule, "data_norm": False}
    if workers:
        found = run(work, workers=workers, **strategy)
    else:
        found = [work(Process(Network(), None, **strategy), 0)]
    for counts, rows in found:
        shows, clicks = counts.T.astype(np.float64)
        score = ((shows - clicks) * 0.1 + clicks * 1.0) * 0.5
        stay = int((score.astype(np.float32) >= np.float32(0.33)).sum())
        assert 0 < stay < (shows > 0).sum()
        assert rows == {"emb": stay, "emb.shown": stay}


def test_what_is_not_there_is_refused_on_all_workers(tmp_path: Path) -> None:
    def work(process: Process, number: int) -> None:
        process.begin()
        said = "is not there" if number == 0 else "trainer 0 could not load"
        with pytest.raises(CheckpointError, match=said):
            process.fleet.load_model(str(tmp_path / "nothing"))
        with pytest.raises(ValueError, match="servers have no table 9"):
            process.fleet.save_one_table(9, str(tmp_path))
        with pytest.raises(ValueError, match="decay is 0"):
            process.fleet.shrink_dense_table(0)
        for call in (process.fleet.save_model, process.fleet.load_model):
            with pytest.raises(NotImplementedError, match="mode 1"):
                call(str(tmp_path), mode=1)
        with pytest.raises(NotImplementedError, match="no cache of rows"):
            process.fleet.save_cache_model(process.exe, str(tmp_path))
        process.fleet.stop_worker()

    run(work, workers=2)


def test_nothing_is_done_before_minimize() -> None:
    fleet = PSLib()
    fleet.init(UserDefinedRoleMaker(0, Role.SERVER, 1, SERVERS))
    for call in (fleet.init_worker, fleet.init_server, fleet.run_server):
        with pytest.raises(ValueError, match=r"You should run DistributedOptimizer.minimize\(\)"):
            call()
    process = Process(Network(), UserDefinedRoleMaker(0, Role.SERVER, 1, SERVERS))
    with pytest.raises(ValueError, match="There is no directory named 'absent'"):
        process.fleet.init_server("absent")
    with pytest.raises(ValueError, match="this process is a server, and trains nothing"):
        process.fleet.init_worker()
    worker = Process(Network(), UserDefinedRoleMaker(0, Role.WORKER, 1, SERVERS))
    for call in (worker.fleet.init_server, worker.fleet.run_server):
        with pytest.raises(ValueError, match="this process is a worker, and serves nothing"):
            call()
    with pytest.raises(NotImplementedError, match="mode 1"):
        process.fleet.init_server(mode=1)
    worker = Process(Network(), None)
    with fluid.scope_guard(fluid.Scope()), pytest.raises(ValueError, match="has no value yet"):
        worker.fleet.init_worker()
