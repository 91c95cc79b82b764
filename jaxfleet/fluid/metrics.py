"""Metrics accumulated over batches in numpy, from fetched values."""

import copy
from abc import ABC, abstractmethod
from typing import Any, NoReturn

import numpy as np

from jaxfleet.errors import UnsupportedError
from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.ops.user_frames import line_of_caller

_EMPTY = "feed it with update() first"


class MetricBase(ABC):
    """A metric whose state is its public attributes; named by its class unless given."""

    def __init__(self, name: str | None = None) -> None:
        self._name = type(self).__name__ if name is None else str(name)

    def __str__(self) -> str:
        return self._name

    def reset(self) -> None:
        """Resets the state: numbers and arrays become zeros, other values None."""
        for attr, value in self._states().items():
            if isinstance(value, int | float):
                setattr(self, attr, type(value)(0))
            else:
                is_array = isinstance(value, np.ndarray | np.generic)
                setattr(self, attr, np.zeros_like(value) if is_array else None)

    def get_config(self) -> dict[str, Any]:
        """Returns the name and the state."""
        return {"name": self._name, "states": copy.deepcopy(self._states())}

    def _states(self) -> dict[str, Any]:
        return {attr: value for attr, value in vars(self).items() if not attr.startswith("_")}

    @abstractmethod
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Adds a batch."""

    @abstractmethod
    def eval(self) -> Any:
        """Returns the metric over all batches."""


class CompositeMetric(MetricBase):
    """Several metrics of the same predictions and labels."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._metrics: list[MetricBase] = []

    def add_metric(self, metric: MetricBase) -> None:
        """Adds a metric; ValueError if it is not a metric."""
        if not isinstance(metric, MetricBase):
            raise mistake("what is added to a CompositeMetric is no metric", "a MetricBase")
        self._metrics.append(metric)

    def update(self, preds: Any, labels: Any) -> None:
        for metric in self._metrics:
            metric.update(preds, labels)

    def eval(self) -> list[Any]:
        return [metric.eval() for metric in self._metrics]


class Precision(MetricBase):
    """The fraction of predicted positives that are positive."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.tp = self.fp = 0

    def update(self, preds: np.ndarray, labels: np.ndarray) -> None:
        """Adds a batch: probabilities `f32[b,1]`, and labels of the same shape, 0 or 1."""
        predicted, actual = _rounded(preds, labels)
        self.tp += int((predicted & actual).sum())
        self.fp += int((predicted & ~actual).sum())

    def eval(self) -> float:
        return self.tp / (self.tp + self.fp) if self.tp + self.fp else 0.0


class Recall(MetricBase):
    """The fraction of positives that are predicted to be positive."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.tp = self.fn = 0

    def update(self, preds: np.ndarray, labels: np.ndarray) -> None:
        """Adds a batch, as `Precision.update`."""
        predicted, actual = _rounded(preds, labels)
        self.tp += int((predicted & actual).sum())
        self.fn += int((~predicted & actual).sum())

    def eval(self) -> float:
        return self.tp / (self.tp + self.fn) if self.tp + self.fn else 0.0


class Accuracy(MetricBase):
    """The weighted mean of the batches' accuracies."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.value = self.weight = 0.0

    def update(self, value: Any, weight: float) -> None:
        """Adds a batch by its accuracy and its number of rows.

        Raises:
            ValueError: one is not a number, or the weight is negative.
        """
        if np.size(value) != 1 or np.size(weight) != 1 or float(np.asarray(weight).item()) < 0:
            raise mistake(f"an accuracy of {value!r} and weight {weight!r}", "two numbers")
        self.value += float(np.asarray(value).item()) * float(np.asarray(weight).item())
        self.weight += float(np.asarray(weight).item())

    def eval(self) -> float:
        if self.weight == 0:
            raise mistake("there is no data in Accuracy", _EMPTY)
        return self.value / self.weight


class ChunkEvaluator(MetricBase):
    """Precision, recall and F1 of chunks, from the counts of `layers.chunk_eval`."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.num_infer_chunks = self.num_label_chunks = self.num_correct_chunks = 0

    def update(self, num_infer_chunks: Any, num_label_chunks: Any, num_correct_chunks: Any) -> None:
        """Adds the counts of a batch: inferred, labelled and correct chunks."""
        self.num_infer_chunks += _count(num_infer_chunks, "num_infer_chunks")
        self.num_label_chunks += _count(num_label_chunks, "num_label_chunks")
        self.num_correct_chunks += _count(num_correct_chunks, "num_correct_chunks")

    def eval(self) -> tuple[float, float, float]:
        correct = self.num_correct_chunks
        precision = correct / self.num_infer_chunks if self.num_infer_chunks else 0.0
        recall = correct / self.num_label_chunks if self.num_label_chunks else 0.0
        f1 = 2 * precision * recall / (precision + recall) if correct else 0.0
        return precision, recall, f1


class EditDistance(MetricBase):
    """The mean distance of sequences, and the fraction of incorrect ones."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.total_distance = 0.0
        self.seq_num = self.instance_error = 0

    def update(self, distances: np.ndarray, seq_num: Any) -> None:
        """Adds a batch: distances `f32[b,1]`, and their number."""
        check_type(distances, "distances", np.ndarray)
        count = _count(seq_num, "seq_num")
        self.total_distance += float(distances.sum())
        self.instance_error += count - int((distances == 0).sum())
        self.seq_num += count

    def eval(self) -> tuple[float, float]:
        if self.seq_num == 0:
            raise mistake("there is no data in EditDistance", _EMPTY)
        return self.total_distance / self.seq_num, self.instance_error / self.seq_num


class Auc(MetricBase):
    """The area under the ROC curve, from probabilities counted in `num_thresholds` + 1 bins."""

    def __init__(
        self, name: str | None = None, curve: str = "ROC", num_thresholds: int = 4095
    ) -> None:
        super().__init__(name)
        if curve != "ROC":
            raise mistake(f"curve is {curve!r}", "'ROC' alone is computed")
        self._curve, self._num_thresholds = curve, num_thresholds
        self._stat_pos = np.zeros(num_thresholds + 1, np.int64)
        self._stat_neg = np.zeros(num_thresholds + 1, np.int64)

    def reset(self) -> None:
        self._stat_pos[:] = 0
        self._stat_neg[:] = 0

    def update(self, preds: np.ndarray, labels: np.ndarray) -> None:
        """Adds a batch: probabilities `f32[b,2]`, the second of class 1, and labels `i64[b,1]`."""
        check_type(preds, "preds", np.ndarray)
        check_type(labels, "labels", np.ndarray)
        bins = (np.asarray(preds)[:, 1] * self._num_thresholds).astype(np.int64)
        is_positive = np.asarray(labels).reshape(-1) != 0
        np.add.at(self._stat_pos, bins[is_positive], 1)
        np.add.at(self._stat_neg, bins[~is_positive], 1)

    def eval(self) -> float:
        return area(self._stat_pos, self._stat_neg, of_one_class=0.0)


def area(positive: np.ndarray, negative: np.ndarray, *, of_one_class: float = 0.5) -> float:
    """Returns the area under the curve of counts by bucket, by trapezoids.

    >>> area(np.array([0, 1, 1]), np.array([1, 1, 0]))
    0.875
    """
    above = np.concatenate([[0], np.cumsum(positive[::-1])]).astype(np.float64)
    total = above[-1] * negative.sum()
    if not total:
        return of_one_class
    return float((negative[::-1] * (above[:-1] + above[1:]) / 2).sum() / total)


class DetectionMAP:
    """The mean average precision of boxes, which is not supported: raises NotImplementedError."""

    def __init__(
        self,
        input: Any,
        gt_label: Any,
        gt_box: Any,
        gt_difficult: Any = None,
        class_num: int | None = None,
        background_label: int = 0,
        overlap_threshold: float = 0.5,
        evaluate_difficult: bool = True,
        ap_version: str = "integral",
    ) -> NoReturn:
        del input, gt_label, gt_box, gt_difficult, class_num, background_label
        del overlap_threshold, evaluate_difficult, ap_version
        what = "DetectionMAP: the layers of detection, whose boxes it compares, are not here"
        hint = "fetch boxes and scores, and compute it in numpy"
        raise UnsupportedError(what, source=line_of_caller(), hint=hint)


def _rounded(preds: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns rounded predictions, and labels; ValueError if one is not an array."""
    for name, given in (("preds", preds), ("labels", labels)):
        if not isinstance(given, np.ndarray | np.generic):
            raise mistake(f"The '{name}' must be a numpy ndarray", "what exe.run fetched")
    count = len(labels)
    predicted = np.rint(np.asarray(preds)).reshape(-1)[:count] == 1
    return predicted, np.asarray(labels).reshape(-1) == 1


def _count(given: Any, name: str) -> int:
    if np.size(given) != 1:
        raise mistake(f"The '{name}' must be a number or an array of one", f"not {given!r}")
    return int(np.asarray(given).item())
