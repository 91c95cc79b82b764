"""fluid.metrics, fluid.contrib.memory_usage and fluid.profiler."""

from pathlib import Path

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid import metrics
from tests.fluid.nets import fresh

PREDS = np.array([[0.1], [0.7], [0.8], [0.9], [0.2], [0.2], [0.3], [0.5], [0.8], [0.6]])
LABELS = np.array([[0], [1], [1], [1], [1], [0], [0], [0], [0], [0]])


def test_precision_and_recall_are_counted_over_batches() -> None:
    both = metrics.CompositeMetric()
    both.add_metric(metrics.Precision())
    both.add_metric(metrics.Recall())
    both.update(preds=PREDS[:4], labels=LABELS[:4])
    both.update(preds=PREDS[4:], labels=LABELS[4:])
    assert both.eval() == [3 / 5, 3 / 4]
    with pytest.raises(ValueError, match="is no metric"):
        both.add_metric(1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="The 'preds' must be a numpy ndarray"):
        metrics.Precision().update([1], LABELS)  # type: ignore[arg-type]


def test_an_accuracy_is_the_mean_of_batches_by_their_weights() -> None:
    made = metrics.Accuracy("top1")
    made.update(value=np.array([0.5], np.float32), weight=1)
    made.update(value=0.8, weight=2)
    assert made.eval() == pytest.approx(0.7)
    assert str(made) == "top1"
    assert made.get_config() == {"name": "top1", "states": {"value": 2.1, "weight": 3.0}}
    made.reset()
    with pytest.raises(ValueError, match="there is no data in Accuracy"):
        made.eval()
    with pytest.raises(ValueError, match="and weight -1"):
        made.update(0.5, -1)


def test_chunks_and_distances_add_up() -> None:
    chunks = metrics.ChunkEvaluator()
    chunks.update(10, np.array([9]), 8)
    chunks.update(3, 2, 1)
    precision, recall, f1 = chunks.eval()
    assert (precision, recall) == (9 / 13, 9 / 11)
    assert f1 == pytest.approx(2 * precision * recall / (precision + recall))
    distance = metrics.EditDistance()
    distance.update(np.array([[0.0], [3.0]]), 2)
    assert distance.eval() == (1.5, 0.5)


def test_the_area_under_the_curve_is_the_chance_of_a_right_order() -> None:
    random = np.random.default_rng(0)
    score, label = random.random(400), random.integers(0, 2, 400)
    score = np.clip(score + 0.2 * label, 0, 1)
    made = metrics.Auc()
    preds = np.stack([1 - score, score], 1)
    made.update(preds[:100], label[:100, None])
    made.update(preds[100:], label[100:, None])
    positive, negative = score[label == 1], score[label == 0]
    order = np.sign(positive[:, None] - negative[None])
    assert made.eval() == pytest.approx((order.mean() + 1) / 2, abs=1e-3)
    made.reset()
    assert made.eval() == 0.0


def test_a_precision_of_boxes_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"the layers of detection, .* are not here"):
        fluid.metrics.DetectionMAP(None, None, None)


def test_memory_is_estimated_by_what_operators_write() -> None:
    with fresh() as (main, _):
        x = fluid.data("x", [None, 256])
        fluid.layers.scale(x, 2.0)
    least, most, unit = fluid.contrib.memory_usage(main, batch_size=10)
    assert unit == "KB"
    assert least == pytest.approx(10 * 1.05)
    assert most == pytest.approx(10 * 1.1)
    with pytest.raises(TypeError, match="takes a Program, not a str"):
        fluid.contrib.memory_usage("main", 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size is 0"):
        fluid.contrib.memory_usage(main, 0)


def test_a_profile_becomes_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    with fresh() as (main, _):
        out = fluid.layers.fill_constant([1], "float32", 1.0)
        exe = fluid.Executor(fluid.CPUPlace())
        with fluid.profiler.profiler("CPU", "total", str(folder)):
            exe.run(main, fetch_list=[out])
            fluid.profiler.reset_profiler()
            exe.run(main, fetch_list=[out])
    assert [path for path in folder.rglob("*") if path.is_file()]
    fluid.profiler.stop_profiler("calls", str(folder))  # no profiler runs


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("TPU",), "The state must be 'CPU' or 'GPU' or 'All'"),
        (("CPU", "longest"), "The sorted_key must be None or in 'calls'"),
        (("CPU", None, "p", "Some"), "tracer option must be"),
    ],
)
def test_a_profile_of_something_else_is_refused(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said), fluid.profiler.profiler(*arguments):
        pass
