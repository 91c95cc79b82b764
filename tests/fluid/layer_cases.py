"""Layers on small inputs, built alike by fluid 1.8.5 and by jaxfleet for comparison.

`conformance/record_layers.py` runs them under fluid 1.8.5 on Python 3.7, so this module imports
only numpy. A feed is an array, or rows with the lengths of their sequences.
"""

from __future__ import annotations  # for Python 3.7, which lacks `dict[str, Any]`

import math
from typing import Any

import numpy as np


def drawn(seed: int, *shape: int) -> Any:
    """Draws numbers that are exact in float32 and in JSON."""
    return np.random.RandomState(seed).uniform(-1, 1, shape).round(3).astype("float32")


class Case:
    """One layer.

    Attributes:
        build: takes `fluid` and variables by name; returns the fetches, and the loss or None.
        feed: values by name; floating ones are differentiated.
        params: the names of parameters that `build` makes by `param`; also differentiated.
        fixed: the first axis is not the batch: the first of padded CTC input is time.
    """

    def __init__(
        self,
        build: Any,
        feed: dict[str, Any],
        params: tuple[str, ...] = (),
        *,
        fixed: bool = False,
    ) -> None:
        self.fixed = fixed
        self.build, self.feed, self.params = build, feed, params


def declared(fluid: Any, name: str, value: Any, *, fixed: bool) -> Any:
    """Declares a fed variable; its first axis is the batch, unless sizes are fixed."""
    rows = value[0] if isinstance(value, tuple) else value
    level = 1 if isinstance(value, tuple) else 0
    made = fluid.data(
        name, [rows.shape[0] if fixed else None, *rows.shape[1:]], str(rows.dtype), lod_level=level
    )
    made.stop_gradient = False
    return made


def param(fluid: Any, name: str, value: Any) -> Any:
    """Names a parameter, with its initial value."""
    return fluid.ParamAttr(name, initializer=fluid.initializer.NumpyArrayInitializer(value))


def squared(fluid: Any, x: Any) -> Any:
    """Sums the squares, so that each element has a different gradient."""
    return fluid.layers.reduce_sum(fluid.layers.square(x))


def of_image(layer: str, **given: Any) -> Any:
    """A layer of one named image."""

    def build(fluid: Any, v: dict[str, Any]) -> Any:
        out = getattr(fluid.layers, layer)(v["x"], **given)
        return [out], squared(fluid, out)

    return build


def of_rows(make: Any, pool: str | None = "sum") -> Any:
    """A layer that makes sequences: each is pooled, since a loss is a scalar."""

    def build(fluid: Any, v: dict[str, Any]) -> Any:
        out = make(fluid.layers, v)
        if not out.lod_level:  # of sequence_slice, whose level fluid 1.8.5 drops
            return [out], squared(fluid, out)
        if pool is None:
            pooled = fluid.layers.sequence_pool(fluid.layers.square(out), "sum")
            return [out], fluid.layers.reduce_sum(pooled)
        return [out], squared(fluid, fluid.layers.sequence_pool(out, pool))

    return build


def of_pad(maxlen: int | None, pad: list[float]) -> Any:
    def build(fluid: Any, v: dict[str, Any]) -> Any:
        value = fluid.layers.assign(np.asarray(pad, "float32"))
        out, length = fluid.layers.sequence_pad(v["x"], value, maxlen)
        return [out, length], squared(fluid, out)

    return build


def padded_and_back(fluid: Any, v: dict[str, Any]) -> Any:
    layers = fluid.layers
    zero = layers.assign(np.zeros(1, "float32"))
    out, length = layers.sequence_pad(v["x"], zero, 4)
    back = layers.sequence_unpad(layers.scale(out, 3.0), length)
    return [back], squared(fluid, layers.sequence_pool(back, "sqrt"))


def of_conv3d(**given: Any) -> Any:
    def build(fluid: Any, v: dict[str, Any]) -> Any:
        wide = drawn(3, given["num_filters"], 4 // (given.get("groups") or 1), 2, 3, 2)
        out = fluid.layers.conv3d(
            v["x"],
            filter_size=[2, 3, 2],
            param_attr=param(fluid, "w", wide),
            bias_attr=param(fluid, "c", drawn(4, given["num_filters"])),
            **given,
        )
        return [out], squared(fluid, out)

    return build


def of_ctc(**given: Any) -> Any:
    def build(fluid: Any, v: dict[str, Any]) -> Any:
        out = fluid.layers.warpctc(
            v["x"], v["label"], input_length=v.get("n"), label_length=v.get("m"), **given
        )
        return [out], squared(fluid, out)

    return build


def of_distance(**given: Any) -> Any:
    def build(fluid: Any, v: dict[str, Any]) -> Any:
        out, count = fluid.layers.edit_distance(
            v["x"], v["y"], input_length=v.get("n"), label_length=v.get("m"), **given
        )
        return [out, count], None

    return build


def of_sampled(**given: Any) -> Any:
    def build(fluid: Any, v: dict[str, Any]) -> Any:
        out = fluid.layers.sampled_softmax_with_cross_entropy(
            v["x"],
            v["label"],
            3,
            use_customized_samples=True,
            customized_samples=v["samples"],
            customized_probabilities=v["shares"],
            **given,
        )
        return [out], squared(fluid, out)

    return build


IMAGE, VOLUME = drawn(0, 2, 3, 4, 5), drawn(1, 2, 4, 3, 5, 4)
ROWS, LENGTHS = drawn(2, 6, 2), [3, 1, 2]
X = {"x": (ROWS, LENGTHS)}
CTC = {
    "x": (drawn(5, 9, 4), [5, 4]),
    "label": (np.array([[1], [1], [2], [3]], "int32"), [3, 1]),
}
CTC_PADDED = {
    "x": drawn(6, 5, 2, 4),
    "label": np.array([[1, 1, 2], [3, 0, 0]], "int32"),
    "n": np.array([5, 4], "int64"),
    "m": np.array([3, 1], "int64"),
}
WORDS = {
    "x": (np.array([[1], [2], [3], [4], [5], [2]], "int64"), [4, 2]),
    "y": (np.array([[1], [3], [3], [2], [2], [7]], "int64"), [3, 3]),
}
WORDS_PADDED = {
    "x": np.array([[1, 2, 3, 4], [5, 2, 0, 0]], "int64"),
    "y": np.array([[1, 3, 3], [2, 2, 7]], "int64"),
    "n": np.array([4, 2], "int64"),
    "m": np.array([3, 3], "int64"),
}
# A true class, and three drawn ones: the draws of row 1 contain the true class by accident.
SAMPLED = {
    "x": drawn(7, 3, 6),
    "label": np.array([[0], [2], [5]], "int64"),
    "samples": np.array([[0, 1, 2, 3], [2, 1, 2, 3], [5, 1, 2, 3]], "int64"),
    "shares": np.array([[0.5, 0.25, 0.5, 0.125]] * 3, "float32"),
}

CASES = {
    "sequence_pad": Case(of_pad(None, [0.5]), X),
    "sequence_pad by a row": Case(of_pad(5, [0.5, -1.0]), X),
    "sequence_unpad": Case(padded_and_back, X),
    "sequence_concat": Case(
        of_rows(lambda layers, v: layers.sequence_concat([v["x"], v["y"], v["x"]]), "max"),
        dict(X, y=(drawn(8, 5, 2), [2, 2, 1])),
    ),
    "sequence_slice": Case(
        of_rows(lambda layers, v: layers.sequence_slice(v["x"], v["offset"], v["n"]), None),
        dict(X, offset=np.array([[1], [0], [0]], "int64"), n=np.array([[2], [1], [1]], "int64")),
    ),
    "sequence_reshape to narrower rows": Case(
        of_rows(lambda layers, v: layers.sequence_reshape(v["x"], 1), "sqrt"), X
    ),
    "sequence_reshape to wider rows": Case(
        of_rows(lambda layers, v: layers.sequence_reshape(v["x"], 4), "sqrt"),
        {"x": (ROWS, [4, 2])},
    ),
    "warpctc": Case(of_ctc(), CTC),
    "warpctc by times": Case(of_ctc(norm_by_times=True), CTC),
    "warpctc, another blank": Case(of_ctc(blank=2), dict(CTC, label=(np.array(
        [[1], [1], [0], [3]], "int32"), [3, 1]))),
    # Two equal rows among three, and an empty label.
    "warpctc without time": Case(of_ctc(), dict(CTC, x=(drawn(5, 9, 4), [2, 7]),
                                                label=(np.array([[1], [1]], "int32"), [2, 0]))),
    "warpctc, padded": Case(of_ctc(), CTC_PADDED, fixed=True),
    "edit_distance": Case(of_distance(normalized=False), WORDS),
    "edit_distance, normalized": Case(of_distance(), WORDS),
    "edit_distance, without tokens": Case(of_distance(ignored_tokens=[2, 5]), WORDS),
    "edit_distance, padded": Case(of_distance(), WORDS_PADDED),
    "sampled_softmax": Case(of_sampled(), SAMPLED),
    "sampled_softmax with accidents": Case(of_sampled(remove_accidental_hits=False), SAMPLED),
    "conv3d": Case(of_conv3d(num_filters=3, stride=[1, 2, 1], padding=1), {"x": VOLUME},
                   ("w", "c")),
    "conv3d in groups": Case(of_conv3d(num_filters=4, groups=2, dilation=[1, 1, 2],
                                       padding=[0, 1, 1, 1, 1, 1]), {"x": VOLUME}, ("w", "c")),
    "conv3d, the same size": Case(of_conv3d(num_filters=2, padding="SAME", stride=2),
                                  {"x": VOLUME}, ("w", "c")),
    "conv3d, channels last": Case(
        of_conv3d(num_filters=2, data_format="NDHWC"),
        {"x": np.ascontiguousarray(np.moveaxis(VOLUME, 1, 4))}, ("w", "c")),
    "pool3d": Case(of_image("pool3d", pool_size=2, pool_stride=[1, 2, 2], pool_padding=[0, 1, 1]),
                   {"x": VOLUME}),
    "pool3d by averages": Case(
        of_image("pool3d", pool_size=[2, 3, 2], pool_type="avg", pool_stride=2,
                 pool_padding=[0, 1, 0], ceil_mode=True), {"x": VOLUME}),
    "pool3d of all": Case(of_image("pool3d", pool_type="avg", global_pooling=True), {"x": VOLUME}),
}  # fmt: skip

for _corners, _mode in ((True, 1), (False, 1), (False, 0)):
    _name = f"resize_bilinear, corners {_corners:d}, mode {_mode}"
    for _how, _given in (
        ("larger", {"out_shape": [7, 9]}),
        ("smaller", {"out_shape": [2, 3]}),
        ("scaled", {"scale": 1.5}),
    ):
        CASES[f"{_name}, {_how}"] = Case(
            of_image("resize_bilinear", align_corners=_corners, align_mode=_mode, **_given),
            {"x": IMAGE},
        )
    CASES[f"resize_trilinear, corners {_corners:d}, mode {_mode}"] = Case(
        of_image("resize_trilinear", out_shape=[5, 3, 7], align_corners=_corners, align_mode=_mode),
        {"x": VOLUME},
    )
for _corners in (True, False):
    for _how, _given in (("larger", {"out_shape": [7, 9]}), ("smaller", {"scale": 0.6})):
        CASES[f"resize_nearest, corners {_corners:d}, {_how}"] = Case(
            of_image("resize_nearest", align_corners=_corners, **_given), {"x": IMAGE}
        )
CASES["resize_bilinear, channels last"] = Case(
    of_image("resize_bilinear", out_shape=[6, 8], data_format="NHWC"), {"x": IMAGE}
)
CASES["image_resize_short"] = Case(of_image("image_resize_short", out_short_len=3), {"x": IMAGE})


def run(fluid: Any, case: Case) -> dict[str, Any]:
    """Builds and runs a case; returns its results and gradients of its inputs by name."""
    main, startup = fluid.Program(), fluid.Program()
    scope = fluid.scope_guard(fluid.Scope())
    with fluid.program_guard(main, startup), scope, fluid.unique_name.guard():
        given = {n: declared(fluid, n, x, fixed=case.fixed) for n, x in case.feed.items()}
        outputs, loss = case.build(fluid, given)
        grads = {}
        if loss is not None:
            names = [n for n in given if given[n].dtype == given["x"].dtype and n != "shares"]
            wanted = [given[n] for n in names]
            wanted += [main.global_block().var(n) for n in case.params]
            found = fluid.gradients([loss], wanted)
            grads = dict(zip([*names, *case.params], found))  # noqa: B905  # Python 3.7
        exe = fluid.Executor(fluid.CPUPlace())
        if startup.global_block().ops:
            exe.run(startup)
        feed = {
            name: fluid.create_lod_tensor(value[0], [value[1]], fluid.CPUPlace())
            if isinstance(value, tuple)
            else value
            for name, value in case.feed.items()
        }
        fetched = [*outputs, *grads.values()]
        made = exe.run(main, feed=feed, fetch_list=fetched, return_numpy=False)
    count = len(outputs)
    return {
        "outputs": [_shown(value) for value in made[:count]],
        "gradients": {n: _shown(value) for n, value in zip(grads, made[count:])},  # noqa: B905
    }


def _shown(value: Any) -> dict[str, Any]:
    array = np.asarray(value)
    lengths = value.recursive_sequence_lengths() if hasattr(value, "lod") else []
    flat = [float(f"{x:.9g}") if math.isfinite(x) else str(x) for x in array.ravel()]
    return {"shape": list(array.shape), "lengths": lengths, "values": flat}
