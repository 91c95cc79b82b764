"""Sparse tables on servers: trainers look rows up, and train as one process does."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import FeedError, ProgramError
from jaxfleet.fluid import layers
from tests.fluid.pserver.jobs import Build, Feed, Script, run_alone, run_job, shared_out
from tests.fluid.pserver.memory import Job

ROWS, DIM, BATCH = 2100, 8, 8  # 16800 elements: two servers have some rows each


def net(
    make: Callable[[], Any] = lambda: fluid.optimizer.SGD(0.5),
    *,
    is_sparse: bool = True,
    padding: int | None = None,
) -> fluid.Variable:
    """Returns the loss of a net with two lookups in one table."""
    first, second = (fluid.data(f"ids{n}", [None, 3], dtype="int64") for n in range(2))
    looked_up = [
        fluid.embedding(
            ids, [ROWS, DIM], is_sparse=is_sparse, padding_idx=padding, param_attr="emb"
        )
        for ids in (first, second)
    ]
    x = layers.concat([layers.reshape(rows, [-1, 3 * DIM]) for rows in looked_up], axis=1)
    y = fluid.data("y", [None, 1])
    loss = layers.mean(layers.square_error_cost(layers.fc(x, 1, param_attr="w"), y))
    make().minimize(loss)
    return loss


def batches(steps: int = 5, *, least: int = 0, most: int = ROWS) -> list[Feed]:
    random = np.random.default_rng(5)
    found: list[Feed] = []
    for _ in range(steps):
        ids = random.integers(least, most, (2, BATCH, 3))
        ids[1, :, 0] = ids[0, :, 0]  # lookups share rows
        y = random.normal(size=(BATCH, 1)).astype(np.float32)
        found.append({"ids0": ids[0], "ids1": ids[1], "y": y})
    return found


def check_same(build: Build, dense: Build, fed: list[Feed], **more: Any) -> None:
    """Checks that two trainers with servers' tables have the losses of one process."""
    job, alone = run_job(build, shared_out(fed, 2), **more), run_alone(dense, fed)
    np.testing.assert_allclose(np.mean(job.losses, 0), alone.losses[0], rtol=1e-4)
    table = np.concatenate([
        np.asarray(scope[name])
        for scope in job.scopes
        for name in sorted(n for n, _ in scope.items() if n in {"emb", "emb.block0", "emb.block1"})
    ])  # fmt: skip
    np.testing.assert_allclose(table, alone.params[0]["emb"], rtol=1e-3, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "RMSProp"])
def test_rows_on_servers_train_as_a_dense_table_in_one_process(name: str) -> None:
    make = partial(getattr(fluid.optimizer, name), 0.05)
    check_same(partial(net, make), partial(net, make, is_sparse=False), batches())


@pytest.mark.grid
def test_a_table_is_never_whole_on_a_trainer() -> None:
    job = run_job(net, shared_out(batches(2), 2))
    assert all(params["emb"].shape == (0, DIM) for params in job.params)


@pytest.mark.grid
def test_rows_of_padding_are_zeros_and_stay_what_they_are() -> None:
    build = partial(net, padding=3)
    fed = batches(3, most=6)
    check_same(build, partial(net, padding=3, is_sparse=False), fed, servers=1)


def test_ids_that_a_table_lacks_are_nan_and_train_nothing() -> None:
    fed = batches(1)
    fed[0]["ids0"][0, 0] = ROWS
    fed[0]["ids1"][1, 0] = -1
    job = run_job(net, [fed], servers=2)
    assert np.isnan(job.losses).all()


def words() -> fluid.Variable:
    """Returns the loss of a net over sequences of words of different lengths."""
    ids = layers.data("words", [1], dtype="int64", lod_level=1)
    rows = layers.embedding(ids, [ROWS, DIM], is_sparse=True, param_attr="emb")
    out = layers.fc(layers.sequence_pool(rows, "average"), 1, param_attr="w")
    loss = layers.mean(layers.square(out - 1.0))
    fluid.optimizer.SGD(0.5).minimize(loss)
    return loss


@pytest.mark.grid
def test_sequences_of_ids_are_looked_up() -> None:
    random = np.random.default_rng(1)
    fed: list[Any] = []
    for _ in range(3):
        lengths = [2, 3, 1, 4]
        ids = random.integers(0, 50, (sum(lengths), 1))
        fed.append({"words": fluid.create_lod_tensor(ids, [lengths], fluid.CPUPlace())})
    job, alone = run_job(words, [fed], servers=2), run_alone(words, fed)
    np.testing.assert_allclose(job.losses, alone.losses, rtol=1e-4)


def saved(tmp_path: Path, fed: list[Feed], *, save: bool) -> list[float]:
    """Trains with one trainer; saves at the end, or loads at the beginning."""
    endpoints = ["127.0.0.1:7401", "127.0.0.1:7402"]
    script = Script(Job(), partial(net, lambda: fluid.optimizer.Adam(0.05)), endpoints, 1)

    def server(number: int) -> None:
        main, startup = script.transpiled()[0].get_pserver_programs(endpoints[number])
        exe, scope = script.executor(), fluid.Scope()
        exe.run(startup, scope=scope)
        if not save:
            with fluid.scope_guard(scope):
                fluid.io.load_persistables(exe, tmp_path, main)
        exe.run(main, scope=scope)

    def trainer() -> list[float]:
        transpiler, startup, loss = script.transpiled()
        exe, scope = script.executor(), fluid.Scope()
        main = transpiler.get_trainer_program()
        exe.run(startup, scope=scope)
        ran = [exe.run(main, feed=dict(f), fetch_list=[loss], scope=scope)[0][0] for f in fed]
        with fluid.scope_guard(scope):
            if save:
                fluid.io.save_persistables(exe, tmp_path, main)
        with pytest.raises(FeedError, match="'emb' is fetched, and trainers have only the rows"):
            exe.run(main, feed=dict(fed[0]), fetch_list=["emb"], scope=scope)
        exe.close()
        return [float(value) for value in ran]

    people: dict[str, Callable[[], Any]] = {f"server {n}": partial(server, n) for n in range(2)}
    done: list[float] = script.job.run({**people, "trainer 0": trainer})["trainer 0"]
    return done


def test_a_table_is_saved_whole_and_goes_on_where_it_was(tmp_path: Path) -> None:
    fed = batches(4)
    saved(tmp_path, fed[:2], save=True)
    rest = saved(tmp_path, fed[2:], save=False)
    whole = run_job(partial(net, lambda: fluid.optimizer.Adam(0.05)), [fed]).losses[0]
    np.testing.assert_allclose(rest, whole[2:], rtol=1e-6)


def test_ids_that_a_program_computes_are_refused() -> None:
    def build() -> fluid.Variable:
        ids = layers.cast(fluid.data("x", [None, 3]), "int64")
        rows = fluid.embedding(ids, [ROWS, DIM], is_sparse=True, param_attr="emb")
        loss = layers.mean(rows)
        fluid.optimizer.SGD(0.1).minimize(loss)
        return loss

    script = Script(Job(), build, ["a:1"], 1)
    main = script.transpiled()[0].get_trainer_program()
    with pytest.raises(ProgramError, match="is computed, and servers are asked for its rows"):
        script.executor().run(main, scope=fluid.Scope())
