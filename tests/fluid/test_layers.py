"""Every layer builds, infers the shape of its result, and is differentiated."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import ProgramError
from jaxfleet.fluid import layers, nets
from jaxfleet.fluid.lowering.program_cache import runnable
from jaxfleet.ir import evaluate
from jaxfleet.ops import Interpreter
from jaxfleet.ops.jax_adapter import numpy_dtype
from jaxfleet.runtime import Scope
from tests.fluid.nets import fresh

V: TypeAlias = fluid.Variable
RANDOM = np.random.default_rng(0)
ROWS = 2

# Arguments of layers: `x` and `y` are `[rows, 4, 6]` and depend on a parameter, as does `image`,
# `[rows, 4, 6, 6]`; `ids` and `row` are indices.
Given: TypeAlias = dict[str, V]


def of_one(name: str) -> Callable[[Given], Any]:
    return lambda v: getattr(layers, name)(v["x"])


def of_two(name: str) -> Callable[[Given], Any]:
    return lambda v: getattr(layers, name)(v["x"], v["y"])


def of_two_truths(name: str) -> Callable[[Given], Any]:
    return lambda v: getattr(layers, name)(v["x"] > 0.5, v["y"] > 0.5)


def activated(name: str) -> Callable[[Given], Any]:
    return lambda v: getattr(layers, name)(v["x"], v["y"], act="tanh")


SMOOTH: dict[str, Callable[[Given], Any]] = {
    **{name: of_one(name) for name in (
        "relu", "tanh", "sigmoid", "logsigmoid", "square", "sqrt", "rsqrt", "abs", "exp", "log",
        "erf", "reciprocal", "sin", "cos", "sinh", "cosh", "asin", "acos", "atan", "softsign",
        "softplus", "tanh_shrink", "gelu", "leaky_relu", "elu", "selu", "relu6", "pow", "stanh",
        "hard_sigmoid", "swish", "hard_swish", "brelu", "soft_relu", "softshrink", "hard_shrink",
        "thresholded_relu", "softmax", "scale", "mean", "cumsum", "reduce_sum", "reduce_mean",
        "reduce_max", "reduce_min", "reduce_prod",
    )},
    **{name: activated(name) for name in (
        "elementwise_add", "elementwise_sub", "elementwise_mul", "elementwise_div",
        "elementwise_max", "elementwise_min", "elementwise_pow",
    )},
    "reduce along axes": lambda v: layers.reduce_sum(v["x"], dim=[1, -1], keep_dim=True),
    "clip": lambda v: layers.clip(v["x"], 0, 1),
    "clip_by_norm": lambda v: layers.clip_by_norm(v["x"], 1),
    "l2_normalize": lambda v: layers.l2_normalize(v["x"], 2),
    "matmul": lambda v: layers.matmul(v["x"], v["y"], transpose_y=True, alpha=0.5),
    "mul": lambda v: layers.mul(v["x"], layers.create_parameter([24, 3], "float32")),
    "sum": lambda v: layers.sum([v["x"], v["y"]]),
    "sums": lambda v: layers.sums([v["x"], v["y"]]),
    "fc": lambda v: layers.fc([v["x"], v["y"]], 3, num_flatten_dims=2, act="relu"),
    "fc over the last axis": lambda v: layers.fc(v["x"], 3, num_flatten_dims=-1, bias_attr=False),
    "dropout": lambda v: layers.dropout(v["x"], 0.3, dropout_implementation="upscale_in_train"),
    "layer_norm": lambda v: layers.layer_norm(v["x"], begin_norm_axis=2, act="tanh"),
    "layer_norm alone": lambda v: layers.layer_norm(v["x"], scale=False, shift=False),
    "batch_norm": lambda v: layers.batch_norm(v["image"], act="relu"),
    "conv2d": lambda v: layers.conv2d(v["image"], 3, 3, stride=2, padding=1, act="relu"),
    "conv2d_transpose": lambda v: layers.conv2d_transpose(v["image"], 3, filter_size=3, stride=2),
    "pool2d": lambda v: layers.pool2d(v["image"], [2, 3], "avg", [2, 3]),
    "adaptive_pool2d": lambda v: layers.adaptive_pool2d(v["image"], [2, 4]),
    "simple_img_conv_pool": lambda v: nets.simple_img_conv_pool(v["image"], 2, 3, 2, 2),
    "glu": lambda v: nets.glu(v["x"]),
    "reshape": lambda v: layers.reshape(v["x"], [0, -1, 3]),
    "reshape over rows": lambda v: layers.reshape(v["x"], [-1, 3]),
    "transpose": lambda v: layers.transpose(v["x"], [0, 2, 1]),
    "squeeze": lambda v: layers.squeeze(layers.unsqueeze(v["x"], [1]), [1]),
    "unsqueeze": lambda v: layers.unsqueeze(v["x"], 1),
    "flatten": lambda v: layers.flatten(v["x"], axis=2),
    "concat": lambda v: layers.concat([v["x"], v["y"]], axis=-1),
    "concat of rows": lambda v: layers.concat([v["x"], v["y"]]),
    "stack": lambda v: layers.stack([v["x"], v["y"]], axis=1),
    "unstack": lambda v: layers.unstack(v["x"], axis=1)[3],
    "split": lambda v: layers.split(v["x"], [1, -1], dim=1)[1],
    "split evenly": lambda v: layers.split(v["x"], 3)[0],
    "expand": lambda v: layers.expand(v["x"], [1, 2, 1]),
    "pad": lambda v: layers.pad(v["x"], [0, 0, 1, 0, 0, 2], 0.5),
    "reverse": lambda v: layers.reverse(v["x"], 1),
    "cast": lambda v: layers.cast(v["x"], "float16"),
    "assign": lambda v: layers.assign(v["x"]),
    "topk": lambda v: layers.topk(v["x"], 2)[0],
    "argsort": lambda v: layers.argsort(v["x"], axis=1, descending=True)[0],
    "gather": lambda v: layers.gather(v["x"], v["row"]),
    "gather_nd": lambda v: layers.gather_nd(v["x"], v["row"]),
    "scatter": lambda v: layers.scatter(v["x"], v["row"], layers.gather(v["y"], v["row"])),
    "slice": lambda v: layers.slice(v["x"], [1, 2], [1, -2], [3, 9]),
    "strided_slice": lambda v: layers.strided_slice(v["x"], [2], [0], [6], [2]),
    "square_error_cost": lambda v: layers.square_error_cost(v["x"], v["y"]),
    "mse_loss": lambda v: layers.mse_loss(v["x"], v["y"]),
    "cross_entropy": lambda v: layers.cross_entropy(layers.softmax(v["x"]), v["ids"]),
    "cross_entropy, soft": lambda v: layers.cross_entropy(v["x"], v["y"], soft_label=True),
    "softmax_with_cross_entropy": lambda v: layers.softmax_with_cross_entropy(v["x"], v["ids"]),
    "sigmoid_cross_entropy_with_logits": lambda v: layers.sigmoid_cross_entropy_with_logits(
        v["x"], v["y"], normalize=True
    ),
    "log_loss": lambda v: layers.log_loss(v["x"], v["y"]),
    "huber_loss": lambda v: layers.huber_loss(v["x"], v["y"], 0.2),
    "label_smooth": lambda v: layers.label_smooth(v["x"]),
    "embedding": lambda v: layers.embedding(v["ids"], [9, 3], padding_idx=-1),
    "fluid.embedding": lambda v: fluid.embedding(v["ids"], [9, 3], is_sparse=True),
}  # fmt: skip

FLAT: dict[str, Callable[[Given], Any]] = {
    **{name: of_one(name) for name in (
        "floor", "ceil", "round", "sign", "shape", "is_empty", "argmax", "argmin", "zeros_like",
        "ones_like",
    )},
    **{name: of_two(name) for name in (
        "less_than", "less_equal", "greater_than", "greater_equal", "equal", "not_equal",
        "elementwise_mod", "elementwise_floordiv",
    )},
    **{name: of_two_truths(name) for name in ("logical_and", "logical_or", "logical_xor")},
    "logical_not": lambda v: layers.logical_not(v["x"] > 0.5),
    "reduce_all": lambda v: layers.reduce_all(v["x"] > 0.5, dim=1),
    "reduce_any": lambda v: layers.reduce_any(v["x"] > 0.5),
    "one_hot": lambda v: layers.one_hot(v["ids"], 5),
    "fluid.one_hot": lambda v: fluid.one_hot(v["ids"], 5),
    "zeros": lambda _: layers.zeros([2, 3], "float32"),
    "ones": lambda _: layers.ones([2, 3], "int64"),
    "fill_constant": lambda _: layers.fill_constant([2], np.float32, 0.5),
    "fill_constant_batch_size_like": lambda v: layers.fill_constant_batch_size_like(
        v["x"], [-1, 3], "float32", 2
    ),
    "assign of values": lambda _: layers.assign(np.eye(2, dtype=np.float32)),
    "uniform_random": lambda _: layers.uniform_random([2, 3], min=0, max=1, seed=3),
    "gaussian_random": lambda _: layers.gaussian_random([2, 3], std=2, dtype="float32"),
    "accuracy": lambda v: layers.accuracy(layers.reshape(v["x"], [-1, 6]), v["flat"]),
}  # fmt: skip


def given() -> dict[str, V]:
    made = {
        "x": layers.data("x", [4, 6]),
        "y": layers.data("y", [4, 6]),
        "image": layers.data("image", [4, 6, 6]),
    }
    for name in ("x", "y", "image"):
        weight = layers.create_parameter(list(made[name].shape[1:]), "float32")
        made[name] = layers.elementwise_mul(made[name], weight)
    made["ids"] = layers.data("ids", [4, 1], dtype="int64")
    made["row"] = layers.data("row", [1], append_batch_size=False, dtype="int64")
    made["flat"] = layers.reshape(made["ids"], [-1, 1])
    return made


def traced(main: fluid.Program, names: list[str]) -> dict[str, Any]:
    """Returns the shapes and dtypes of a run's results, without the slow compilation."""
    program, sizes = runnable(main), {"b": ROWS}

    def like(variable: Any) -> jax.ShapeDtypeStruct:
        shape = tuple(evaluate(size, sizes) for size in variable.shape)
        return jax.ShapeDtypeStruct(shape, numpy_dtype(variable.dtype))

    def run(values: dict[str, Any]) -> dict[str, Any]:
        scope = Interpreter(program, sizes).run(values, keep=names)
        return {name: scope[name] for name in names}

    given = {name: like(variable) for name, variable in program.variables.items()}
    made: dict[str, Any] = jax.eval_shape(run, given)
    return made


def agrees(declared: V, found: Any) -> bool:
    """Whether a value has the inferred shape, and the dtype of a device."""
    narrow = {"int64": "int32", "float64": "float32"}
    fits = [size in {-1, own} for size, own in zip(declared.shape, found.shape, strict=True)]
    return all(fits) and narrow.get(declared.dtype, declared.dtype) == found.dtype.name


def test_each_layer_makes_what_it_says_and_has_a_gradient() -> None:
    with fresh() as (main, _):
        have = given()
        made = {name: layer(have) for name, layer in SMOOTH.items()}
        parts = [layers.reduce_sum(layers.cast(out, "float32")) for out in made.values()]
        pairs = fluid.append_backward(layers.sums(parts))
    everything = [*made.values(), *(grad for _, grad in pairs)]
    found = traced(main, [v.name for v in everything])
    for name, out in made.items():
        assert agrees(out, found[out.name]), f"{name}: {out} is {found[out.name]}"
    for param, grad in pairs:
        assert found[grad.name].shape == param.shape, param.name
    untrained = {p.name for p in main.all_parameters() if not p.trainable}
    assert {p.name for p, _ in pairs} | untrained == {p.name for p in main.all_parameters()}
    forward, back = ({op.type for op in main.global_block().ops if op.attr("op_role") == role}
                     for role in (0, 1))  # fmt: skip
    others = {"assign", "cast", "cross_entropy2", "cumsum", "reverse", "scale", "split", "sum"}
    assert {t for t in forward if f"{t}_grad" not in back} == others
    assert "cross_entropy_grad2" in back


def test_gradients_that_other_operators_compute_are_fluids() -> None:
    with fresh() as (main, _), fluid.scope_guard(Scope()):
        x = layers.data("x", [4])
        x.stop_gradient = False
        _, second = layers.split(layers.scale(x, 3.0, bias=1.0), [1, 3], dim=1)
        parts = [
            layers.cumsum(second, axis=1, exclusive=True) * layers.assign(second),
            layers.reverse(layers.cast(second, "float32"), 1) * second,
            layers.sums([second, second]) * layers.sign(second),
        ]
        loss = layers.reduce_sum(layers.sum(parts))
        (grad,) = fluid.gradients(loss, x)
        value = np.asarray([[0.5, -1.0, 2.0, 3.0]], np.float32)
        (found,) = fluid.Executor().run(main, feed={"x": value}, fetch_list=[grad])
        types = [op.type for op in main.global_block().ops]

    def formula(x: Any) -> Any:
        made = 3 * x + 1
        more = made[:, 1:]
        before = jax.numpy.cumsum(more, 1) - more
        sums = before * more + more[:, ::-1] * more + 2 * more * jax.numpy.sign(more)
        return sums.sum()

    np.testing.assert_allclose(found, jax.grad(formula)(value), rtol=1e-5)
    back = types[types.index("reduce_sum") :]
    assert {"concat", "cumsum", "assign", "reverse", "cast", "scale"} <= set(back)
    assert not {f"{t}_grad" for t in ("split", "cumsum", "assign", "cast", "scale", "sum")} & {
        *back
    }


def test_each_layer_without_a_gradient_makes_what_it_says() -> None:
    with fresh() as (main, _):
        have = given()
        made = {name: layer(have) for name, layer in FLAT.items()}
    found = traced(main, [out.name for out in made.values()])
    for name, out in made.items():
        assert agrees(out, found[out.name]), f"{name}: {out} is {found[out.name]}"


def test_every_layer_is_among_these_or_tested_elsewhere() -> None:
    elsewhere = {
        "Switch", "auc", "autoincreased_step_counter", "beam_search", "beam_search_decode",
        "create_py_reader_by_data", "double_buffer",
        "py_reader", "read_file", "create_global_var", "create_parameter",
        "conv3d", "cos_sim", "create_tensor", "crf_decoding", "data", "data_norm", "dynamic_gru",
        "dynamic_lstm", "group_norm", "hsigmoid", "image_resize",
        "image_resize_short", "increment", "linear_chain_crf", "nce", "pool3d", "resize_bilinear",
        "resize_nearest", "resize_trilinear", "sampled_softmax_with_cross_entropy",
        "edit_distance", "lod_reset", "sequence_concat", "sequence_conv", "sequence_expand",
        "sequence_pad", "sequence_reshape", "sequence_slice", "sequence_unpad", "warpctc",
        "sequence_first_step", "sequence_last_step", "sequence_pool", "sequence_softmax",
        "noam_decay", "exponential_decay", "natural_exp_decay", "inverse_time_decay",
        "polynomial_decay", "piecewise_decay", "cosine_decay", "linear_lr_warmup",
        "DynamicRNN", "IfElse", "Print", "StaticRNN", "While", "array_length", "array_read",
        "array_write", "case", "cond", "create_array", "py_func", "switch_case", "while_loop",
        "reorder_lod_tensor_by_rank",
    }  # fmt: skip
    there = {n for n in vars(layers) if not n.startswith("_") and callable(getattr(layers, n))}
    assert there - {*SMOOTH, *FLAT} == elsewhere


def test_what_writes_into_variables_that_are_there() -> None:
    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        total = layers.create_global_var([1], 2.0, "float32", persistable=True)
        room = layers.create_tensor("float32", name="room")
        is_less = layers.create_tensor("bool")
        two, three = (layers.fill_constant([1], "float32", v) for v in (2.0, 3.0))
        assert layers.sums([two, three], out=room) is room
        assert layers.less_than(two, three, cond=is_less) is is_less
        assert layers.increment(total, 0.5) is total
        more = layers.increment(total, 1.0, in_place=False)
        exe = fluid.Executor()
        exe.run(startup)
        fetch = [room, is_less, total, more]
        runs = [exe.run(main, fetch_list=fetch) for _ in range(2)]
    assert [v.tolist() for v in runs[0]] == [[5.0], [True], [2.5], [3.5]]
    assert [v.tolist() for v in runs[1]] == [[5.0], [True], [3.0], [4.0]]


def test_an_area_under_the_curve_over_runs() -> None:
    scores = RANDOM.random((3, 16)).astype(np.float32)
    label = (RANDOM.random((3, 16)) < scores).astype(np.int64)

    def share(rows: slice) -> float:
        high, low = (scores[rows][label[rows] == kind] for kind in (1, 0))
        return float(np.mean(high[:, None] > low[None, :]))

    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        x, y = layers.data("x", [2]), layers.data("y", [1], dtype="int64")
        overall, recent, state = layers.auc(x, y, num_thresholds=100000)
        exe = fluid.Executor()
        exe.run(startup)
        found = []
        for run in range(3):
            columns = np.stack([1 - scores[run], scores[run]], 1)
            feed = {"x": columns, "y": label[run][:, None]}
            found.append([float(v[0]) for v in exe.run(main, feed=feed,
                                                       fetch_list=[overall, recent])])  # fmt: skip
        (counted,) = exe.run(main.clone(for_test=True), feed=feed, fetch_list=[state[2]])
    wanted = [[share(slice(0, run + 1)), share(slice(run, run + 1))] for run in range(3)]
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    assert [len(state), state[0].shape, state[2].shape] == [4, (2 * 100001 + 1,), (1, 100001)]
    assert counted.sum() == label.sum() + label[2].sum()
    assert [op.type for op in main.global_block().ops] == ["auc", "auc"]


def test_dropout_is_undone_in_expectation_when_tested() -> None:
    for way, tested in (("downgrade_in_infer", 0.75), ("upscale_in_train", 1.0)):
        with fresh() as (main, _), fluid.scope_guard(Scope()):
            x = layers.data("x", [4000])
            out = layers.dropout(x, 0.25, dropout_implementation=way)
            exe, feed = fluid.Executor(), {"x": np.ones((1, 4000), np.float32)}
            (trained,) = exe.run(main, feed=feed, fetch_list=[out])
            (made,) = exe.run(main.clone(for_test=True), feed=feed, fetch_list=[out.name])
        assert trained.mean() == pytest.approx(tested, abs=0.03)
        assert set(made.ravel()) == {np.float32(tested)}


def test_a_shared_embedding_begins_once_and_keeps_its_padding() -> None:
    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        ids = layers.data("ids", [1], dtype="int64")
        made = [layers.embedding(ids, [5, 2], param_attr="shared", padding_idx=i) for i in (-1, 0)]
        exe = fluid.Executor()
        exe.run(startup)
        feed = {"ids": np.asarray([[0], [4], [2]])}
        last, first = exe.run(main, feed=feed, fetch_list=made)
    assert len(startup.global_block().ops) == 1
    assert [row.any() for row in last] == [True, False, True]
    assert [row.any() for row in first] == [False, True, True]
    op = main.global_block().ops[0]
    assert (op.type, op.attr("padding_idx")) == ("lookup_table", 4)
    assert (op.attr("is_sparse"), op.attr("remote_prefetch")) == (False, False)


def test_layers_that_cannot_be() -> None:
    with fresh():
        x = layers.data("x", [4, 6])
        for call, message in (
            (lambda: layers.fc(x, 3, num_flatten_dims=3), "leaves no axis"),
            (lambda: layers.fc(layers.data("u", [-1, -1]), 3), "are not all known"),
            (lambda: layers.split(x, [1, 2], dim=1), r"sections \[1, 2\] are not the 4 of axis 1"),
            (lambda: layers.split(x, [-1, -1], dim=1), "one section at most"),
            (lambda: layers.sums([x, layers.data("z", [6])]), "arrays of one shape"),
            (lambda: layers.unstack(x), "give num|the size of axis 0 is not known"),
            (lambda: layers.dropout(x, 1.5), "a share is between 0 and 1"),
            (lambda: layers.dropout(x, 0.5, dropout_implementation="none"), "no implementation"),
            (lambda: layers.auc(x, x, curve="PR"), "the curve is 'ROC'"),
            (lambda: layers.reshape(x, [5, 5]), "operator 'reshape2' cannot take"),
            (lambda: layers.one_hot(x, 3), "the last size of its input is 1"),
        ):
            with pytest.raises(ProgramError, match=message):
                call()


def test_data_norm_has_fluids_parameters_and_beginnings() -> None:
    with fresh() as (main, startup):
        x = layers.data("x", [3])
        layers.data_norm(x, param_attr={"batch_size": 10, "batch_square": 20})
        begun = {op.output("Out")[0]: op.attr("value") for op in startup.global_block().ops}
        with pytest.raises(ProgramError, match=r"the input is \[rows, columns\]"):
            layers.data_norm(layers.data("y", [3, 4]))
        with pytest.raises(ProgramError, match="slot_dim is 2"):
            layers.data_norm(x, slot_dim=2)
        with pytest.raises(ProgramError, match=r"begins with 0\.0 rows"):
            layers.data_norm(x, param_attr={"batch_size": 0})
    assert [p.name for p in main.all_parameters()] == [
        "data_norm_0.batch_size", "data_norm_0.batch_sum", "data_norm_0.batch_square_sum"
    ]  # fmt: skip
    assert begun == dict(zip([p.name for p in main.all_parameters()], [10, 0, 20], strict=True))
