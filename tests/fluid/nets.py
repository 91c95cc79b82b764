"""Nets and optimizers of the recorded cases, built by jaxfleet's front end."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxfleet import fluid
from jaxfleet.fluid import layers


def fc1(part: int = 1) -> fluid.Variable:
    size = 1000 // part
    x, y = layers.data("x", [size]), layers.data("y", [1])
    hidden = layers.fc(x, size, param_attr="fc_w", bias_attr="fc_b")
    out = layers.fc(hidden, 1, param_attr="out_w", bias_attr="out_b")
    return layers.mean(layers.square_error_cost(out, y))


def mlp(part: int = 1) -> fluid.Variable:
    x, y = layers.data("x", [784 // part]), layers.data("y", [1], dtype="int64")
    hidden = layers.fc(x, 513 // part, act="relu", param_attr="w0", bias_attr="b0")
    hidden = layers.fc(hidden, 257 // part, act="relu", param_attr="w1", bias_attr="b1")
    out = layers.fc(hidden, 10, act="softmax", param_attr="w2", bias_attr="b2")
    return layers.mean(layers.cross_entropy(out, y))


def ctr(part: int = 1) -> fluid.Variable:
    ids, dense = layers.data("ids", [26], dtype="int64"), layers.data("dense", [13])
    y = layers.data("y", [1], dtype="int64")
    rows = fluid.embedding(ids, size=[10001 // part, 16], is_sparse=True, param_attr="emb")
    x = layers.concat([layers.reshape(rows, [-1, 416]), dense], axis=1)
    hidden = layers.fc(x, 400 // part, act="relu", param_attr="w0", bias_attr="b0")
    hidden = layers.fc(hidden, 400 // part, act="relu", param_attr="w1", bias_attr="b1")
    out = layers.fc(hidden, 2, act="softmax", param_attr="w2", bias_attr="b2")
    return layers.mean(layers.cross_entropy(out, y))


NETS = {"fc1": fc1, "mlp": mlp, "ctr": ctr}


def optimizer(name: str) -> Any:
    """Returns the optimizer of a recorded case; adds schedules to the program."""
    made = fluid.optimizer
    match name:
        case "sgd":
            return made.SGD(0.1)
        case "momentum":
            return made.Momentum(0.1, 0.9)
        case "adam":
            return made.Adam(0.001)
        case "adagrad":
            return made.Adagrad(0.1)
        case "rmsprop":
            return made.RMSProp(0.1)
        case "sgd_decay":
            return made.SGD(layers.exponential_decay(0.1, 100, 0.9, True))
        case "adam_decay":
            return made.Adam(layers.piecewise_decay([100, 200], [0.1, 0.01, 0.001]))
        case "sgd_l2":
            return made.SGD(0.1, regularization=fluid.regularizer.L2Decay(1e-4))
        case "sgd_clip":
            return made.SGD(0.1, grad_clip=fluid.clip.GradientClipByGlobalNorm(1.0))
    raise KeyError(name)


@contextmanager
def fresh() -> Iterator[tuple[fluid.Program, fluid.Program]]:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.unique_name.guard(), fluid.program_guard(main, startup):
        yield main, startup


def built(net: str, optimizer_name: str, *, part: int = 1) -> tuple[fluid.Program, fluid.Program]:
    """Returns the main and the startup program of a case, its sizes divided by `part`."""
    with fresh() as (main, startup):
        loss = NETS[net](part)
        optimizer(optimizer_name).minimize(loss)
    return main, startup
