"""Plain programs trained on datasets: each batch is a step of `Executor.run`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid import layers
from tests.fluid.dataset.files import written
from tests.fluid.nets import fresh


class Line:
    """A program that fits a line, with its feeds, in an initialized scope."""

    def __init__(self) -> None:
        with fresh() as (self.main, startup):
            x, y = fluid.data("x", [None, 1]), fluid.data("y", [None, 1])
            out = layers.fc(x, 1, param_attr="w", bias_attr="b")
            self.loss, self.fed = layers.mean(layers.square_error_cost(out, y)), [x, y]
            self.main.random_seed = startup.random_seed = 3
            fluid.optimizer.Adam(0.1).minimize(self.loss)
        self.scope, self.exe = fluid.Scope(), fluid.Executor()
        self.exe.run(startup, scope=self.scope)

    def dataset(self, paths: list[str], batch: int) -> Any:
        made = fluid.DatasetFactory().create_dataset("QueueDataset")
        made.set_batch_size(batch)
        made.set_filelist(paths)
        made.set_use_var(self.fed)
        return made


def points(count: int) -> np.ndarray:
    x = np.random.default_rng(2).standard_normal(count).astype(np.float32)
    return np.stack([x, 3 * x + 1], 1)


def file(folder: Path, values: np.ndarray) -> str:
    return written(folder / "points", [([x], [y]) for x, y in values.tolist()])


def test_a_pass_over_a_dataset_is_a_run_for_each_batch(tmp_path: Path) -> None:
    values, ours, hand = points(21), Line(), Line()
    ours.exe.train_from_dataset(ours.main, ours.dataset([file(tmp_path, values)], 5), ours.scope)
    for at in range(0, 21, 5):
        feed = {"x": values[at : at + 5, :1], "y": values[at : at + 5, 1:]}
        hand.exe.run(hand.main, feed, scope=hand.scope)
    for name in ("w", "b"):
        np.testing.assert_array_equal(np.array(ours.scope[name]), np.array(hand.scope[name]))


def test_inference_leaves_out_updates_and_shows_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = Line()
    before, data = np.array(line.scope["w"]), line.dataset([file(tmp_path, points(10))], 2)
    line.exe.infer_from_dataset(
        line.main, data, line.scope, fetch_list=[line.loss], fetch_info=["loss"], print_period=2
    )
    said = capsys.readouterr().out.splitlines()
    assert [text.partition(": [")[0] for text in said] == [
        "batch 0: loss", "batch 2: loss", "batch 4: loss"
    ]  # fmt: skip
    np.testing.assert_array_equal(np.array(line.scope["w"]), before)


def test_every_batch_is_shown_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = Line()
    data = line.dataset([file(tmp_path, points(3))], 1)
    line.exe.train_from_dataset(line.main, data, line.scope, debug=True)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_handler_is_given_values_by_time(tmp_path: Path) -> None:
    line, seen = Line(), list[float]()

    class Handler(fluid.FetchHandler):
        def handler(self, res_dict: Any) -> None:
            seen.append(float(res_dict["the loss"][0]))

    data = line.dataset([file(tmp_path, points(12))], 4)
    handler = Handler({"the loss": line.loss}, period_secs=0)
    line.exe.train_from_dataset(line.main, data, line.scope, fetch_handler=handler)
    assert len(seen) == 3
    assert seen[-1] < seen[0]
    with pytest.raises(AssertionError, match="is given no variables"):
        fluid.FetchHandler()


def test_what_is_missing_is_said_as_fluid_says_it(tmp_path: Path) -> None:
    line = Line()
    data = line.dataset([file(tmp_path, points(2))], 1)
    with pytest.raises(RuntimeError, match="dataset is need and should be initialized"):
        line.exe.train_from_dataset(line.main)
    with pytest.raises(AssertionError, match="fetch_info has 2 texts, and fetch_list 1"):
        line.exe.infer_from_dataset(line.main, data, fetch_list=[line.loss], fetch_info=["a", "b"])
    data.set_thread(0)
    with pytest.raises(RuntimeError, match="You should set thread num first"):
        line.exe.train_from_dataset(line.main, data)
    line.exe.train_from_dataset(line.main, data, line.scope, thread=1)
    with pytest.raises(ValueError, match="print_period is 0"):
        line.exe.train_from_dataset(line.main, data, print_period=0)
    with pytest.raises(TypeError, match="a dataset is of type list"):
        line.exe.train_from_dataset(line.main, [])  # type: ignore[arg-type]  # the point
    line.exe.close()
    with pytest.raises(RuntimeError, match="closed"):
        line.exe.train_from_dataset(line.main, data, line.scope, thread=1)
