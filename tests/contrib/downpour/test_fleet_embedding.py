"""`fleet_embedding`: unchanged layers with the rows of a job; and rejected uses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.contrib.downpour.worker import tables_of
from jaxfleet.fluid import layers
from jaxfleet.fluid.distributed.fleet import Fleet
from jaxfleet.fluid.distributed.ps_instance import PaddlePSInstance
from jaxfleet.fluid.incubate.fleet.parameter_server.pslib import (
    DownpourOptimizer,
    fleet_embedding,
)
from tests.contrib.downpour.jobs import FAR, KEYS, dataset, files
from tests.fluid.nets import fresh

BATCH, WIDTH, RATE = 8, 4, 0.5


class Job:
    """A net with one embedding, written for one device or for pslib, in a scope.

    Args:
        embedding: arguments of the layer.
        scaled: argument of `fleet_embedding`; None leaves it out.
        strategy: of the table.
        label: name of the click labels.
    """

    def __init__(
        self,
        scaled: bool | None,
        strategy: dict[str, Any],
        label: str = "click",
        **embedding: Any,
    ) -> None:
        with fresh() as (self.main, startup):
            self.main.random_seed = startup.random_seed = 5
            ids = fluid.data("ids", [None, 2], dtype="int64")
            words = fluid.data("words", [None, 1], dtype="int64", lod_level=1)
            clicked = fluid.data(label, [None, 1], dtype="int64")
            said = {"size": [10, WIDTH], "param_attr": fluid.ParamAttr(name="emb"), **embedding}
            if scaled is None:
                rows, of_words = fluid.embedding(ids, **said), layers.embedding(words, **said)
            else:
                with fleet_embedding(label, scale_sparse_grad=scaled):
                    rows, of_words = fluid.embedding(ids, **said), layers.embedding(words, **said)
            pooled = layers.sequence_pool(of_words, "sum")
            x = layers.concat([layers.reshape(rows, [-1, 2 * WIDTH]), pooled], axis=1)
            out = layers.fc(x, 2, act="softmax", param_attr="w", bias_attr="b")
            loss = layers.mean(layers.cross_entropy(out, clicked))
            self.found = {"emb": strategy, "dense_table": {"dense_learning_rate": 0.05}}
            optimizer = DownpourOptimizer(fluid.optimizer.Adam(), self.found)
            optimizer.minimize(loss, startup_programs=startup)
        self.fed, self.scope = [ids, words, clicked], fluid.Scope()
        self.exe = fluid.Executor()
        self.exe.run(startup, scope=self.scope)

    def train(self, paths: list[str]) -> "Job":
        data = dataset(self.fed, paths, BATCH)
        self.exe.train_from_dataset(self.main, data, self.scope)
        return self

    def rows(self, name: str = "emb") -> np.ndarray:
        return tables_of(self.main).look_up(name, FAR + np.arange(KEYS))


def plain(rate: float) -> dict[str, Any]:
    """Returns a strategy of rows of any width with plain SGD."""
    return {
        "sparse_accessor_class": "DownpourSparseValueAccessor",
        "sparse_optimizer": "naive",
        "sparse_learning_rate": rate,
        "sparse_initial_range": 0.1,
    }


def test_rows_train_as_those_of_a_distributed_embedding(tmp_path: Path) -> None:
    paths = files(tmp_path, 3 * BATCH, 2 * BATCH)
    spread: dict[str, Any] = {"is_sparse": True, "is_distributed": True}
    wanted = Job(None, {**plain(RATE), "sparse_embedx_dim": WIDTH}, **spread).train(paths)
    found = Job(False, plain(RATE)).train(paths)
    np.testing.assert_array_equal(found.rows(), wanted.rows())
    np.testing.assert_array_equal(found.scope["w"], wanted.scope["w"])
    # Scaled gradients, with a rate divided by the batch size: the same up to rounding.
    scaled = Job(True, plain(RATE / BATCH)).train(paths)
    np.testing.assert_allclose(scaled.rows(), wanted.rows(), rtol=1e-5, atol=1e-6)
    alike = Job(True, plain(RATE)).train(paths).rows()
    assert np.abs(wanted.rows() - alike).max() > 1e-2
    told = found.main._fleet_opt
    assert told["device_worker"] == "Hogwild"
    assert [t.accessor.embedx_dim for t in told["fleet_desc"].tables if t.table_id == 0] == [WIDTH]


def test_rows_with_counts_are_told_who_was_clicked(tmp_path: Path) -> None:
    job = Job(True, {}, label="bought").train(files(tmp_path, 2 * BATCH))
    lines = (tmp_path / "part-0-0").read_text().splitlines()
    keys, clicks = [], 0
    for line in lines:
        values = [int(word) for word in line.split()]
        mine = [value for value in values if value >= FAR]
        keys += mine
        clicks += values[-1] * len(mine)
    counted = job.rows("emb.shown")
    assert counted.sum(0).tolist() == [len(keys), clicks]
    assert job.rows().shape == (KEYS, WIDTH - 2)


def test_a_layer_outside_is_as_it_says_and_key_0_is_padding_inside() -> None:
    with fresh() as (main, _):
        ids = fluid.data("ids", [None, 1], dtype="int64")
        with fleet_embedding("click"):
            layers.embedding(ids, [9, 11], param_attr="a")
            fluid.embedding(ids, [9, 11], padding_idx=3, param_attr="b")
        layers.embedding(ids, [9, 11], param_attr="c")
    said = [(op.attr("is_distributed"), op.attr("padding_idx")) for op in main.global_block().ops]
    assert said == [(True, 0), (True, 3), (False, -1)]
    assert main.clone()._fleet_rows.keys() == {"a", "b"}


def test_what_a_job_cannot_look_up() -> None:
    with fresh(), fleet_embedding("click"):
        ids = fluid.data("ids", [None, 1], dtype="int64")
        with pytest.raises(ValueError, match="has no name, by which the job's servers"):
            layers.embedding(ids, [9, 11])
    with pytest.raises(ValueError, match="sparse_embedx_dim of 'emb' is 8, and its embedding"):
        Job(True, {"sparse_embedx_dim": 8})
    with pytest.raises(ValueError, match="rows of 4"):
        Job(True, {**plain(RATE), "sparse_embedx_dim": WIDTH - 3})
    with pytest.raises(TypeError, match="click_name is of type int"), fleet_embedding(1):  # type: ignore[arg-type]  # the tested mistake
        pass


def test_what_began_jobs_before_the_fleets_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="pslib's own library") as caught:
        Fleet()
    assert "pslib.fleet: init(role)" in "".join(caught.value.__notes__)
    with pytest.raises(NotImplementedError, match="which is not here") as caught:
        PaddlePSInstance(1, 2)
    assert "MPISymetricRoleMaker" in "".join(caught.value.__notes__)
