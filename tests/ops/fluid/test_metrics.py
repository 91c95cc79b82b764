"""Metrics, by counting."""

import numpy as np

from tests.ops.fluid.computed import computed

RANDOM = np.random.default_rng(0)
BINS = 200


def drawn(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws predictions, no two of them in one bin, and labels."""
    places = RANDOM.permutation(BINS)[:count]
    positive = ((places + 0.5) / BINS).astype(np.float32)
    label = (RANDOM.random(count) < positive).astype(np.int64)
    return np.stack([1 - positive, positive], 1), label[:, None]


def share_of_pairs(predict: np.ndarray, label: np.ndarray) -> float:
    """Returns the share of pairs in which the positive has the higher prediction."""
    right, wrong = predict[label[:, 0] == 1, 1], predict[label[:, 0] == 0, 1]
    return float(np.mean(right[:, None] > wrong[None, :]))


def test_the_area_is_the_share_of_pairs_in_order_over_all_runs() -> None:
    predict, label = drawn(150)
    counts = np.zeros((1, BINS + 1), np.int32)
    attrs = {"num_thresholds": BINS, "slide_steps": 0}
    state = (counts, counts)
    for start in range(0, 150, 50):
        rows = slice(start, start + 50)
        made = computed("auc", attrs, Predict=predict[rows], Label=label[rows],
                        StatPos=state[0], StatNeg=state[1])  # fmt: skip
        state = made["StatPosOut"], made["StatNegOut"]
    np.testing.assert_allclose(made["AUC"], [share_of_pairs(predict, label)], rtol=1e-5)
    assert state[0].sum() == label.sum()
    assert state[1].sum() == 150 - label.sum()


def test_a_window_forgets_what_is_older() -> None:
    predict, label = drawn(160)
    steps = 2
    counts = np.zeros((1 + steps) * (BINS + 1) + 1, np.int32)
    attrs = {"num_thresholds": BINS, "slide_steps": steps}
    state, areas = (counts, counts), []
    for start in range(0, 160, 40):
        rows = slice(start, start + 40)
        made = computed("auc", attrs, Predict=predict[rows], Label=label[rows],
                        StatPos=state[0], StatNeg=state[1])  # fmt: skip
        state = made["StatPosOut"], made["StatNegOut"]
        areas.append(float(made["AUC"][0]))
    wanted = [share_of_pairs(predict[a:b], label[a:b]) for a, b in
              [(0, 40), (0, 80), (40, 120), (80, 160)]]  # fmt: skip
    np.testing.assert_allclose(areas, wanted, rtol=1e-5)
    assert state[0][-1] == 4


def test_there_is_no_area_without_both_kinds() -> None:
    predict, _ = drawn(10)
    counts = np.zeros((1, BINS + 1), np.int32)
    attrs = {"num_thresholds": BINS, "slide_steps": 0}
    ones = np.ones((10, 1), np.int64)
    made = computed("auc", attrs, Predict=predict, Label=ones, StatPos=counts, StatNeg=counts)
    assert made["AUC"].tolist() == [0.0]


def test_accuracy_counts_rows_whose_label_is_among_the_first() -> None:
    scores = RANDOM.random((20, 6)).astype(np.float32)
    label = RANDOM.integers(0, 6, (20, 1))
    best = computed("top_k", {"k": 2}, X=scores)
    order = np.argsort(-scores, 1)[:, :2]
    np.testing.assert_array_equal(best["Indices"], order)
    made = computed("accuracy", Out=best["Out"], Indices=best["Indices"], Label=label)
    hits = sum(label[row, 0] in order[row] for row in range(20))
    np.testing.assert_allclose(made["Accuracy"], [hits / 20])
    assert (made["Correct"].tolist(), made["Total"].tolist()) == ([hits], [20])
