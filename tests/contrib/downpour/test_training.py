"""Downpour jobs over files: equal to manual steps, and better than chance."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.contrib.downpour.worker import tables_of
from jaxfleet.errors import FeedError, ProgramError
from jaxfleet.fluid import layers
from jaxfleet.fluid.distributed import DownpourSGD
from jaxfleet.fluid.incubate.fleet.parameter_server.pslib import DownpourOptimizer
from jaxfleet.tables import TableSpec, Uniform
from jaxfleet.tables.store import TableStore
from tests.contrib.downpour.jobs import FAR, KEYS, ctr, dataset, files
from tests.fluid.nets import fresh

WIDTH = 4
PLAIN: Mapping[str, Any] = {
    "sparse_accessor_class": "DownpourSparseValueAccessor",
    "sparse_optimizer": "naive",
    "sparse_learning_rate": 0.5,
    "sparse_initial_range": 0.1,
}
STRATEGY: Mapping[str, Any] = {"emb": PLAIN, "dense_table": {"dense_learning_rate": 0.05}}


class Job:
    """A program with its feeds, in an initialized scope."""

    def __init__(self, *, data_norm: bool = False, window: int = 1, **more: Any) -> None:
        with fresh() as (self.main, startup):
            self.main.random_seed = startup.random_seed = 5
            self.loss, out, self.fed = ctr(WIDTH, data_norm=data_norm)
            self.auc, _, _ = layers.auc(out, self.fed[-1])
            optimizer = DownpourOptimizer(fluid.optimizer.Adam(), {**STRATEGY, **more})
            optimizer._distributed_optimizer._window = window
            optimizer.minimize(self.loss, startup_programs=startup)
        self.scope, self.exe = fluid.Scope(), fluid.Executor()
        self.exe.run(startup, scope=self.scope)

    def train(self, paths: list[str], batch: int = 8, **more: Any) -> None:
        data = dataset(self.fed, paths, batch)
        self.exe.train_from_dataset(self.main, data, self.scope, **more)

    def rows(self) -> np.ndarray:
        return tables_of(self.main).look_up("emb", FAR + np.arange(KEYS))

    def value(self, name: str) -> np.ndarray:
        return np.array(self.scope[name])


class ByHand:
    """The same steps in numpy only: the net's gradients, its tables, their rules."""

    def __init__(self, job: Job, begin: Mapping[str, np.ndarray]) -> None:
        spec = TableSpec(name="emb", dim=WIDTH, initializer=Uniform(-0.1, 0.1))
        self.rows = TableStore(spec).look_up(FAR + np.arange(KEYS)).astype(np.float64)
        self.dense = {name: begin[name].astype(np.float64) for name in ("b", "w")}
        self.speed = {name: np.zeros_like(x) for name, x in self.dense.items()}
        self.squares = {name: np.zeros_like(x) for name, x in self.dense.items()}
        self.steps = 0.0
        self.norm: dict[str, np.ndarray] | None = None
        if "norm.batch_size" in job.scope:
            names = ("batch_size", "batch_sum", "batch_square_sum")
            self.norm = {n: begin[f"norm.{n}"].astype(np.float64) for n in names}

    def gradients(self, samples: list[list[list[int]]]) -> tuple[Any, dict[str, np.ndarray]]:
        """Returns gradients of rows and of dense parameters, for the mean over samples."""
        keys = [(np.array(ids) - FAR, np.array(words) - FAR) for ids, words, _ in samples]
        x = np.stack([np.concatenate([*self.rows[a], self.rows[b].sum(0)]) for a, b in keys])
        inner, scales = x, np.ones(x.shape[1])
        more = {}
        if self.norm is not None:
            means = self.norm["batch_sum"] / self.norm["batch_size"]
            scales = np.sqrt(self.norm["batch_size"] / self.norm["batch_square_sum"])
            inner = (x - means) * scales
            count = len(x)
            squares = ((x - means) ** 2).sum(0) + count * 1e-5
            more = {"batch_size": count, "batch_sum": x.sum(0), "batch_square_sum": squares}
        logits = inner @ self.dense["w"] + self.dense["b"]
        chances = np.exp(logits - logits.max(1, keepdims=True))
        chances /= chances.sum(1, keepdims=True)
        back = (chances - np.eye(2)[[c[0] for *_, c in samples]]) / len(samples)
        to_x = back @ self.dense["w"].T * scales
        to_rows = np.zeros_like(self.rows)
        for (ids, words), grad in zip(keys, to_x, strict=True):
            np.add.at(to_rows, ids, grad[: 2 * WIDTH].reshape(2, WIDTH))
            np.add.at(to_rows, words, grad[2 * WIDTH :])
        return to_rows, {"w": inner.T @ back, "b": back.sum(0), **more}

    def update(self, to_rows: np.ndarray, grads: Mapping[str, np.ndarray]) -> None:
        self.rows -= 0.5 * to_rows
        self.steps = 0.9999 * self.steps + 1
        for name, value in self.dense.items():
            g = grads[name]
            self.squares[name] = 0.9999 * self.squares[name] + g * g
            self.speed[name] = 0.99 * self.speed[name] + 0.01 * g
            least = self.steps * 1e-8
            root = np.sqrt((self.steps + least) / (self.squares[name] + least))
            self.dense[name] = value - 0.05 * root * self.speed[name]
        for name in self.norm or {}:
            assert self.norm is not None
            self.norm[name] = 0.999999 * self.norm[name] + grads[name]


def batches(paths: list[str], size: int) -> Iterator[list[list[list[int]]]]:
    """Reads files with an independent reader."""
    lines = [text for path in paths for text in Path(path).read_text().splitlines()]
    samples = []
    for text in lines:
        words, slots = [int(word) for word in text.split()], []
        while words:
            count, *words = words
            slots.append(words[:count])
            words = words[count:]
        samples.append(slots)
    yield from (samples[at : at + size] for at in range(0, len(samples), size))


@pytest.mark.few(1)
@pytest.mark.parametrize("data_norm", [False, True])
def test_a_job_over_files_is_the_steps_made_by_hand(tmp_path: Path, data_norm: bool) -> None:
    paths, job = files(tmp_path, 20, 17), Job(data_norm=data_norm)
    hand = ByHand(job, {name: job.value(name) for name in job.scope})
    job.train(paths)
    for samples in batches(paths, 8):
        hand.update(*hand.gradients(samples))
    # Five steps in float32 against float64; the rate of pslib's Adam is large at first.
    near = partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-5)
    near(job.rows(), hand.rows)
    for name, value in hand.dense.items():
        near(job.value(name), value)
    for name, value in (hand.norm or {}).items():
        near(job.value(f"norm.{name}"), value)


def test_gradients_of_a_window_are_pushed_together(tmp_path: Path) -> None:
    paths, job = files(tmp_path, 40), Job(window=3)
    hand = ByHand(job, {name: job.value(name) for name in job.scope})
    job.train(paths)
    found: list[tuple[Any, dict[str, np.ndarray]]] = []
    for number, samples in enumerate(batches(paths, 8)):
        found.append(hand.gradients(samples))
        if number in {2, 4}:  # five batches: three, and the remaining two
            rows = np.sum([to_rows for to_rows, _ in found], axis=0)
            hand.update(rows, {n: np.sum([g[n] for _, g in found], axis=0) for n in ("w", "b")})
            found.clear()
    np.testing.assert_allclose(job.rows(), hand.rows, rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(job.value("w"), hand.dense["w"], rtol=2e-4, atol=1e-5)


@pytest.mark.grid
def test_a_job_learns_what_is_planted_in_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths, job = files(tmp_path, 300, 300), Job()
    for _ in range(3):
        job.train(paths, batch=32)
    new = dataset(job.fed, files(tmp_path, 400, seed=1), 400)
    for name in [name for name in job.scope if name.startswith("auc")]:
        job.scope[name] = np.zeros_like(job.value(name))  # counts from here on
    job.exe.infer_from_dataset(
        job.main, new, job.scope, fetch_list=[job.auc], fetch_info=["auc"], print_period=1
    )
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("batch 0: auc: ")
    # The planted weights themselves give 0.94; a wrong table stays at 0.5.
    assert float(said.strip("[]").rpartition("[")[2]) > 0.75, said


@pytest.mark.grid
def test_inference_changes_nothing(tmp_path: Path) -> None:
    paths, job = files(tmp_path, 20), Job(data_norm=True)
    job.train(paths)
    before, w = job.rows(), job.value("w")
    data = dataset(job.fed, paths, 8)
    job.exe.infer_from_dataset(job.main, data, job.scope)
    np.testing.assert_array_equal(job.rows(), before)
    np.testing.assert_array_equal(job.value("w"), w)


@pytest.mark.grid
def test_two_runs_over_the_same_files_are_the_same_to_the_bit(tmp_path: Path) -> None:
    paths, jobs = files(tmp_path, 15, 1, 9), (Job(), Job())
    for job, threads in zip(jobs, (1, 3), strict=True):
        job.train(paths, thread=threads)
    np.testing.assert_array_equal(jobs[0].rows(), jobs[1].rows())
    np.testing.assert_array_equal(jobs[0].value("w"), jobs[1].value("w"))


def test_programs_of_one_job_share_its_table(tmp_path: Path) -> None:
    def net() -> tuple[fluid.Variable, Any]:
        ids = fluid.data("ids", [None, 1], dtype="int64")
        y = fluid.data("y", [None, 1])
        rows = layers.embedding(ids, [9, 1], is_distributed=True, is_sparse=True, param_attr="t")
        return layers.mean(layers.square_error_cost(rows, y)), [ids, y]

    with fresh() as (first, startup):
        loss, fed = net()
        second = fluid.Program()
        with fluid.program_guard(second, startup):
            other, _ = net()
        plain = {"t": {**PLAIN, "sparse_initial_range": 0.0}}
        DownpourOptimizer(fluid.optimizer.Adam(), plain).minimize([loss, other])
    path = tmp_path / "file"
    path.write_text("1 3 1 1.0\n")
    exe, scope = fluid.Executor(), fluid.Scope()
    for program in (first, second):
        exe.train_from_dataset(program, dataset(fed, [str(path)], 1), scope)
    assert tables_of(first) is tables_of(second)
    # Both steps halve the distance, twice: the gradient of (row - 1)**2 is 2 (row - 1).
    rows = tables_of(first).look_up("t", np.array([3]))
    np.testing.assert_allclose(rows, [[1.0]])


def test_shows_and_clicks_of_keys_are_counted_and_are_the_first_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fresh() as (main, _):
        ids = fluid.data("ids", [None, 2], dtype="int64")
        click = fluid.data("click", [None, 1], dtype="int64")
        rows = fluid.embedding(ids, [9, 4], is_sparse=True, is_distributed=True, param_attr="t")
        loss = layers.mean(rows)
        DownpourOptimizer(fluid.optimizer.Adam(), {"use_cvm": True, "t": PLAIN}).minimize(loss)
    path = tmp_path / "file"
    path.write_text("2 3 5 1 1\n2 5 5 1 0\n2 3 7 1 1\n")
    data = dataset([ids, click], [str(path)], 2)
    fluid.Executor().train_from_dataset(main, data, fluid.Scope())
    counts = tables_of(main).look_up("t.shown", np.array([3, 5, 7]))
    np.testing.assert_array_equal(counts, [[2, 2], [3, 1], [1, 1]])
    data.set_batch_size(3)
    fluid.Executor().infer_from_dataset(
        main, data, fluid.Scope(), fetch_list=[rows], fetch_info=["rows"]
    )
    said = capsys.readouterr().out
    assert said.startswith("batch 0: rows: [[[ 2.        ,  2.        , "), said


def test_padding_has_rows_of_zeros_and_no_gradients(tmp_path: Path) -> None:
    with fresh() as (main, _):
        ids = fluid.data("ids", [None, 2], dtype="int64")
        rows = fluid.embedding(
            ids, [9, 1], is_sparse=True, is_distributed=True, padding_idx=0, param_attr="t"
        )
        loss = layers.mean(rows)
        DownpourOptimizer(fluid.optimizer.Adam(), {"t": PLAIN}).minimize(loss)
    path = tmp_path / "file"
    path.write_text("2 0 3\n")
    fluid.Executor().train_from_dataset(main, dataset([ids], [str(path)], 1), fluid.Scope())
    keys = np.array([0, 3])
    begun = TableStore(TableSpec(name="t", dim=1, initializer=Uniform(-0.1, 0.1))).look_up(keys)
    np.testing.assert_allclose(
        tables_of(main).look_up("t", keys), begun - np.array([[0], [0.25]], np.float32), rtol=1e-6
    )


def test_what_a_job_lacks_is_said(tmp_path: Path) -> None:
    paths, job = files(tmp_path, 3), Job()
    short = tmp_path / "short"
    short.write_text("2 1 2 1 0\n")
    data = dataset([job.fed[0], job.fed[2]], [str(short)], 1)
    with pytest.raises(FeedError, match="'words' is looked up in a sparse table, and is not fed"):
        job.exe.train_from_dataset(job.main, data, job.scope)
    with pytest.raises(ProgramError, match="parameter 'b' has no value yet"):
        job.exe.train_from_dataset(job.main, dataset(job.fed, paths, 2), fluid.Scope())


def test_an_ordinary_run_of_a_job_is_told_what_looks_rows_up() -> None:
    with fresh() as (main, startup):
        ids = fluid.data("ids", [None, 2], dtype="int64")
        rows = fluid.embedding(ids, [10**12, 4], True, True, param_attr="emb")
        loss = layers.mean(layers.fc(rows, 1))
        DownpourSGD(0.1).minimize([loss], startup_program=startup)
    exe, scope = fluid.Executor(), fluid.Scope()
    exe.run(startup, scope=scope)
    with pytest.raises(FeedError, match="rows of 'emb' are in the tables of a Downpour") as found:
        exe.run(main, {"ids": np.zeros((1, 2), np.int64)}, [loss], scope=scope)
    assert "exe.train_from_dataset(program, dataset)" in "".join(found.value.__notes__)


def test_gradients_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    paths, job = files(tmp_path, 3), Job()
    job.scope["w"] = np.full((3 * WIDTH, 2), np.nan, np.float32)
    with pytest.raises(ProgramError, match=r"gradient.* not finite"):
        job.train(paths)


def test_losses_of_one_program_that_share_parameters_are_refused(tmp_path: Path) -> None:
    with fresh() as (main, startup):
        first, out, fed = ctr()
        DownpourSGD(0.1).minimize([first, layers.mean(out * out)])
    exe, scope = fluid.Executor(), fluid.Scope()
    exe.run(startup, scope=scope)
    with pytest.raises(ProgramError, match="'b' is in the dense tables 1 and 2"):
        exe.train_from_dataset(main, dataset(fed, files(tmp_path, 2), 1), scope)


@pytest.mark.grid
def test_sequences_of_ids_may_keep_their_last_axis(tmp_path: Path) -> None:
    """For [n, 1] ids `fluid.embedding` returns [n, 1, dim], `layers.embedding` [n, dim]."""
    paths, trained = files(tmp_path, 24), []
    for embedding in (layers.embedding, fluid.embedding):
        with fresh() as (main, startup):
            main.random_seed = startup.random_seed = 5
            ids = fluid.data("ids", [None, 2], dtype="int64")
            words = fluid.data("words", [None, 1], dtype="int64", lod_level=1)
            click = fluid.data("click", [None, 1], dtype="int64")
            size = [10**12, WIDTH]
            rows = embedding(words, size, True, True, param_attr="emb")
            summed = layers.reshape(layers.sequence_pool(rows, "sum"), [-1, WIDTH])
            summed += layers.reduce_sum(fluid.embedding(ids, size, True, True, None, "emb"), 1)
            out = layers.fc(summed, 2, act="softmax", param_attr="w")
            loss = layers.mean(layers.cross_entropy(out, click))
            DownpourSGD(0.5, window=1).minimize([loss], startup_program=startup)
        scope, exe, data = fluid.Scope(), fluid.Executor(), dataset([ids, words, click], paths, 8)
        exe.run(startup, scope=scope)
        exe.train_from_dataset(main, data, scope)
        trained.append(tables_of(main).look_up("emb", FAR + np.arange(KEYS)))
    np.testing.assert_array_equal(trained[0], trained[1])
