"""Operators match numpy, or the formula in fluid's documents."""

import math
from typing import Any

import numpy as np

from tests.ops.fluid.computed import Case, all_computed

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(3, 4)).astype(np.float32)
Y = RANDOM.normal(size=(3, 4)).astype(np.float32)
POSITIVE = RANDOM.uniform(0.1, 0.9, (3, 4)).astype(np.float32)
CUBE = RANDOM.normal(size=(2, 3, 4)).astype(np.float32)
IDS = np.asarray([[2], [0], [2]], np.int32)
WHOLE = np.asarray([7, -7, 8], np.int32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def agree(cases: list[tuple[Case, dict[str, Any]]]) -> None:
    made = all_computed([case for case, _ in cases])
    for ((op_type, attrs, _), wanted), outputs in zip(cases, made, strict=True):
        for slot, value in wanted.items():
            message = f"{op_type} {attrs} {slot}"
            np.testing.assert_allclose(outputs[slot], value, rtol=1e-5, atol=1e-6, err_msg=message)


def test_activations() -> None:
    erf = np.vectorize(math.erf)
    wanted: dict[str, np.ndarray] = {
        "relu": np.maximum(X, 0),
        "tanh": np.tanh(X),
        "sigmoid": sigmoid(X),
        "logsigmoid": np.log(sigmoid(X)),
        "tanh_shrink": X - np.tanh(X),
        "square": X * X,
        "abs": np.abs(X),
        "exp": np.exp(X),
        "floor": np.floor(X),
        "ceil": np.ceil(X),
        "sign": np.sign(X),
        "sin": np.sin(X),
        "cos": np.cos(X),
        "sinh": np.sinh(X),
        "cosh": np.cosh(X),
        "atan": np.arctan(X),
        "erf": erf(X),
        "reciprocal": 1 / X,
        "softsign": X / (1 + np.abs(X)),
        "softplus": np.log1p(np.exp(X)),
        "gelu": 0.5 * X * (1 + erf(X / np.sqrt(2))),
        "leaky_relu": np.where(X > 0, X, 0.02 * X),
        "elu": np.where(X > 0, X, np.expm1(X)),
        "selu": 1.0507009873554805 * np.where(X > 0, X, 1.6732632423543772 * np.expm1(X)),
        "relu6": np.clip(X, 0, 6),
        "stanh": 1.7159 * np.tanh(0.67 * X),
        "hard_sigmoid": np.clip(0.2 * X + 0.5, 0, 1),
        "swish": X * sigmoid(X),
        "hard_swish": X * np.clip(X + 3, 0, 6) / 6,
        "brelu": np.clip(X, 0, 24),
        "soft_relu": np.log1p(np.exp(X)),
        "softshrink": np.sign(X) * np.maximum(np.abs(X) - 0.5, 0),
        "hard_shrink": np.where(np.abs(X) > 0.5, X, 0),
        "thresholded_relu": np.where(X > 1, X, 0),
        "softmax": np.exp(X) / np.exp(X).sum(-1, keepdims=True),
    }
    agree([((name, {}, {"X": X}), {"Out": value}) for name, value in wanted.items()])
    positive = {
        "log": np.log(POSITIVE),
        "sqrt": np.sqrt(POSITIVE),
        "rsqrt": 1 / np.sqrt(POSITIVE),
        "asin": np.arcsin(POSITIVE),
        "acos": np.arccos(POSITIVE),
    }
    agree([((name, {}, {"X": POSITIVE}), {"Out": value}) for name, value in positive.items()])
    cubed = ("pow", {"factor": 3.0}, {"X": X})
    approximate = 0.5 * X * (1 + np.tanh(np.sqrt(2 / np.pi) * (X + 0.044715 * X**3)))
    agree([(cubed, {"Out": X**3}),
           (("gelu", {"approximate": True}, {"X": X}), {"Out": approximate})])  # fmt: skip


def test_arithmetic_and_comparisons() -> None:
    both = {"X": X, "Y": Y}
    agree([
        ((f"elementwise_{name}", {}, both), {"Out": value})
        for name, value in {
            "add": X + Y, "sub": X - Y, "mul": X * Y, "div": X / Y, "max": np.maximum(X, Y),
            "min": np.minimum(X, Y), "mod": np.mod(X, Y), "floordiv": X // Y,
        }.items()
    ])  # fmt: skip
    agree([
        ((name, {}, both), {"Out": value})
        for name, value in {
            "less_than": X < Y, "less_equal": X <= Y, "greater_than": X > Y,
            "greater_equal": X >= Y, "equal": X == Y, "not_equal": X != Y,
        }.items()
    ])  # fmt: skip
    true, false = {"X": X > 0, "Y": Y > 0}, {"X": X > 0}
    joined = {"and": (X > 0) & (Y > 0), "or": (X > 0) | (Y > 0), "xor": (X > 0) ^ (Y > 0)}
    agree([((f"logical_{name}", {}, true), {"Out": value}) for name, value in joined.items()])
    row, column = CUBE[0, 0], CUBE[:, 0, 0]
    agree([
        (("logical_not", {}, false), {"Out": X <= 0}),
        (("elementwise_add", {"axis": -1}, {"X": CUBE, "Y": row}), {"Out": CUBE + row}),
        (("elementwise_add", {"axis": 0}, {"X": CUBE, "Y": column}),
         {"Out": CUBE + column[:, None, None]}),
        (("elementwise_div", {}, {"X": WHOLE, "Y": np.asarray([2, 2, 3], np.int32)}),
         {"Out": [3, -3, 2]}),
        (("elementwise_pow", {}, {"X": POSITIVE, "Y": Y}), {"Out": POSITIVE**Y}),
        (("cumsum", {"axis": 0}, {"X": X}), {"Out": X.cumsum(0)}),
        (("cumsum", {"axis": 1, "exclusive": True}, {"X": X}), {"Out": X.cumsum(1) - X}),
        (("cumsum", {"axis": 1, "reverse": True}, {"X": X}),
         {"Out": X[:, ::-1].cumsum(1)[:, ::-1]}),
        (("clip_by_norm", {"max_norm": 1.0}, {"X": X}), {"Out": X / np.linalg.norm(X)}),
        (("clip", {"min": -0.5, "max": 0.5}, {"X": X}), {"Out": np.clip(X, -0.5, 0.5)}),
    ])  # fmt: skip


def test_reductions() -> None:
    cases: list[tuple[Case, dict[str, Any]]] = []
    for name in ("sum", "mean", "max", "min", "prod"):
        take = getattr(np, name)
        one, several = {"dim": [-1], "keep_dim": True}, {"dim": [0, 2]}
        cases += [
            ((f"reduce_{name}", one, {"X": CUBE}), {"Out": take(CUBE, -1, keepdims=True)}),
            ((f"reduce_{name}", several, {"X": CUBE}), {"Out": take(CUBE, (0, 2))}),
            ((f"reduce_{name}", {"reduce_all": True}, {"X": X}), {"Out": [take(X)]}),
        ]
    agree(cases)
    some = X > 0.5
    agree([
        (("reduce_all", {"dim": [1]}, {"X": some}), {"Out": some.all(1)}),
        (("reduce_any", {"dim": [0]}, {"X": some}), {"Out": some.any(0)}),
        (("mean", {}, {"X": X}), {"Out": [X.mean()]}),
    ])  # fmt: skip


def test_shapes() -> None:
    x = {"X": CUBE}
    agree([
        (("reshape2", {"shape": [0, -1, 2]}, x), {"Out": CUBE.reshape(2, 6, 2)}),
        (("transpose2", {"axis": [2, 0, 1]}, x), {"Out": CUBE.transpose(2, 0, 1)}),
        (("flatten2", {"axis": 2}, x), {"Out": CUBE.reshape(6, 4)}),
        (("flatten2", {"axis": 0}, x), {"Out": CUBE.reshape(1, 24)}),
        (("squeeze2", {"axes": []}, {"X": CUBE[:1, None]}), {"Out": CUBE[0]}),
        (("unsqueeze2", {"axes": [0, 2]}, x), {"Out": CUBE[None, :, None]}),
        (("stack", {"axis": 1}, {"X": [X, Y]}), {"Y": np.stack([X, Y], 1)}),
        (("unstack", {"axis": 1, "num": 4}, {"X": X}), {"Y": list(X.T)}),
        (("split", {"num": 2, "axis": 2}, x), {"Out": np.split(CUBE, 2, 2)}),
        (("expand", {"expand_times": [2, 1, 3]}, x), {"Out": np.tile(CUBE, (2, 1, 3))}),
        (("pad", {"paddings": [0, 1, 2, 0], "pad_value": 0.5}, {"X": X}),
         {"Out": np.pad(X, ((0, 1), (2, 0)), constant_values=0.5)}),
        (("reverse", {"axis": [1]}, {"X": X}), {"Out": X[:, ::-1]}),
        (("fill_constant_batch_size_like",
          {"shape": [-1, 2], "value": 3.0, "input_dim_idx": 1, "output_dim_idx": 0},
          {"Input": X}), {"Out": np.full((4, 2), 3.0)}),
        (("fill_any_like", {"value": 2.0}, {"X": X}), {"Out": np.full((3, 4), 2.0)}),
        (("shape", {}, {"Input": CUBE}), {"Out": [2, 3, 4]}),
    ])  # fmt: skip


def test_elements_by_number() -> None:
    order = np.argsort(-X, 1)
    rows = {"X": X, "Ids": np.asarray([2, 0], np.int32), "Updates": Y[:2]}
    written, added = X.copy(), X.copy()
    written[[2, 0]] = Y[:2]
    twice = np.asarray([1, 1], np.int32)
    added[1] = Y[0] + Y[1]
    table = {"W": X, "Ids": IDS}
    agree([
        (("lookup_table", {}, table), {"Out": X[[2, 0, 2]]}),
        (("lookup_table_v2", {}, table), {"Out": X[[[2], [0], [2]]]}),
        (("lookup_table", {"padding_idx": 2}, table),
         {"Out": np.stack([np.zeros(4), X[0], np.zeros(4)])}),
        (("one_hot", {"depth": 3}, {"X": IDS}), {"Out": np.eye(3)[[2, 0, 2]]}),
        (("one_hot_v2", {"depth": 3}, {"X": IDS}), {"Out": np.eye(3)[IDS]}),
        (("top_k", {"k": 2}, {"X": X}),
         {"Out": np.take_along_axis(X, order, 1)[:, :2], "Indices": order[:, :2]}),
        (("argsort", {"axis": 0}, {"X": X}), {"Out": np.sort(X, 0), "Indices": np.argsort(X, 0)}),
        (("argsort", {"descending": True}, {"X": X}), {"Indices": order}),
        (("arg_max", {"axis": 1}, {"X": X}), {"Out": X.argmax(1)}),
        (("arg_min", {"axis": 0}, {"X": X}), {"Out": X.argmin(0)}),
        (("gather", {}, {"X": X, "Index": IDS}), {"Out": X[[2, 0, 2]]}),
        (("gather_nd", {}, {"X": CUBE, "Index": np.asarray([[1, 2], [0, 0]], np.int32)}),
         {"Out": CUBE[[1, 0], [2, 0]]}),
        (("scatter", {}, rows), {"Out": written}),
        (("scatter", {"overwrite": False}, {**rows, "Ids": twice}), {"Out": added}),
        (("slice", {"axes": [0, 2], "starts": [1, -3], "ends": [2, 9], "decrease_axis": [0]},
          {"Input": CUBE}), {"Out": CUBE[1, :, -3:]}),
        (("strided_slice", {"axes": [2], "starts": [0], "ends": [4], "strides": [2]},
          {"Input": CUBE}), {"Out": CUBE[:, :, ::2]}),
    ])  # fmt: skip


def test_losses() -> None:
    label = (Y > 0).astype(np.float32)
    far, near = np.abs(Y - X) - 0.25, (Y - X) ** 2 / 2
    probabilities = sigmoid(X)
    crossed = -label * np.log(probabilities) - (1 - label) * np.log(1 - probabilities)
    shares = np.exp(X) / np.exp(X).sum(-1, keepdims=True)
    target = POSITIVE / POSITIVE.sum(-1, keepdims=True)
    agree([
        (("huber_loss", {"delta": 0.5}, {"X": X, "Y": Y}),
         {"Out": np.where(np.abs(Y - X) <= 0.5, near, 0.5 * far), "Residual": Y - X}),
        (("log_loss", {"epsilon": 0.0}, {"Predicted": probabilities, "Labels": label}),
         {"Loss": crossed}),
        (("sigmoid_cross_entropy_with_logits", {}, {"X": X, "Label": label}), {"Out": crossed}),
        (("label_smooth", {"epsilon": 0.2}, {"X": label}), {"Out": 0.8 * label + 0.05}),
        (("softmax_with_cross_entropy", {"soft_label": True}, {"Logits": X, "Label": target}),
         {"Softmax": shares, "Loss": -(target * np.log(shares)).sum(-1, keepdims=True)}),
        (("cross_entropy", {}, {"X": shares, "Label": target}),
         {"Y": -(target * np.log(shares)).sum(-1, keepdims=True)}),
        (("cross_entropy2", {}, {"X": shares, "Label": IDS}),
         {"Y": -np.log(shares[range(3), IDS[:, 0]])[:, None]}),
    ])  # fmt: skip
