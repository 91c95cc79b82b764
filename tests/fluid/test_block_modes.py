"""Nets with loops, branches and steps train on devices and over servers as on one device.

Among them is the attention decoder of the machine translation model of fluid's book.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid import layers
from jaxfleet.runtime import Scope
from tests.fluid.nets import fresh
from tests.fluid.parallel import devices
from tests.fluid.pserver.jobs import run_job

WORDS, WIDTH, STEPS = 12, 6, 2
RANDOM = np.random.default_rng(0)
Feed = dict[str, Any]
Net = Callable[[], fluid.Variable]


def embedded(name: str) -> fluid.Variable:
    words = layers.data(name, [1], dtype="int64", lod_level=1)
    return layers.embedding(words, [WORDS, WIDTH], param_attr="words")


def attended(state: fluid.Variable, encoded: fluid.Variable) -> fluid.Variable:
    """Returns the mean of the encoder's rows, weighted by their scores for the decoder's state."""
    beside = layers.sequence_expand(layers.fc(state, WIDTH, param_attr="query"), encoded)
    scores = layers.fc([beside, encoded], 1, act="tanh", param_attr=["score_a", "score_b"])
    weights = layers.sequence_softmax(scores)
    return layers.sequence_pool(layers.elementwise_mul(encoded, weights, axis=0), "sum")


def translation() -> fluid.Variable:
    """Returns the loss of an encoder, and of a decoder that attends to its rows."""
    source, target = embedded("source"), embedded("target")
    encoder = layers.DynamicRNN()
    with encoder.block():
        word = encoder.step_input(source)
        before = encoder.memory(shape=[WIDTH])
        hidden = layers.fc([word, before], WIDTH, act="tanh", param_attr=["e_x", "e_h"])
        encoder.update_memory(before, hidden)
        encoder.output(hidden)
    encoded = encoder()
    last = layers.sequence_last_step(encoded)
    decoder = layers.DynamicRNN()
    with decoder.block():
        word = decoder.step_input(target)
        rows = decoder.static_input(encoded)
        before = decoder.memory(init=last, need_reorder=True)
        context = attended(before, rows)
        inputs = [word, before, context]
        hidden = layers.fc(inputs, WIDTH, act="tanh", param_attr=["d_x", "d_h", "d_c"])
        decoder.update_memory(before, hidden)
        decoder.output(layers.fc(hidden, WORDS, act="softmax", param_attr="out"))
    following = layers.data("following", [1], dtype="int64", lod_level=1)
    cost = layers.cross_entropy(decoder(), following)
    return layers.mean(layers.sequence_pool(cost, "sum"))


def looped() -> fluid.Variable:
    """Returns the loss of a net with a loop, an array and a branch."""
    x, y = layers.data("x", [4]), layers.data("y", [1])
    i, n = (layers.fill_constant([1], "int64", value) for value in (0, 3))
    states = layers.array_write(layers.fc(x, 4, param_attr="in"), i)
    go_on = layers.less_than(i, n)
    with layers.While(go_on).block():
        hidden = layers.fc(layers.array_read(states, i), 4, act="tanh", param_attr="w")
        layers.increment(i)
        layers.array_write(hidden, i, states)
        layers.less_than(i, n, cond=go_on)
    last = layers.array_read(states, i)
    made = layers.cond(layers.less_than(n, i), lambda: last, lambda: layers.square(last))
    return layers.mean(layers.square_error_cost(layers.fc(made, 1, param_attr="out"), y))


def summed_up() -> fluid.Variable:
    """Returns the loss of a net over sequences and their last states."""
    rnn, words = layers.DynamicRNN(), embedded("source")
    with rnn.block():
        word, before = rnn.step_input(words), rnn.memory(shape=[WIDTH])
        hidden = layers.fc([word, before], WIDTH, act="tanh", param_attr=["x", "h"])
        rnn.update_memory(before, hidden)
        rnn.output(hidden)
    last = layers.sequence_last_step(rnn())
    static, turned = layers.StaticRNN(), layers.transpose(last, [1, 0])
    with static.step():
        part = static.step_input(turned)
        static.step_output(layers.square(part))
    return layers.mean(static())


def dense(size: int, number: int) -> Feed:
    random = np.random.default_rng(number)
    return {name: random.normal(size=(size, n)).astype("f4") for name, n in (("x", 4), ("y", 1))}


def sentences(size: int, number: int) -> Feed:
    """Returns sequences whose words are to be repeated, so that the loss can fall."""
    random = np.random.default_rng(number)
    source = [random.integers(2, WORDS, (1 + at % 3, 1)) for at in range(size)]
    return {
        "source": source,
        "target": [np.concatenate([[[0]], one[:-1]]) for one in source],
        "following": source,
    }


NETS: dict[str, tuple[Net, Callable[[int, int], Feed]]] = {
    "looped": (looped, dense),
    "summed_up": (summed_up, lambda size, number: {"source": sentences(size, number)["source"]}),
    "translation": (translation, sentences),
}


def parts(feed: Feed) -> list[Feed]:
    half = len(next(iter(feed.values()))) // 2
    return [{n: v[:half] for n, v in feed.items()}, {n: v[half:] for n, v in feed.items()}]


def train(
    net: Net, feeds: list[Feed], run: Callable[[Any, Any, Any], Any] | None = None
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Trains a net in its own scope; returns its losses and parameters."""
    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        main.random_seed = startup.random_seed = 7
        loss = net()
        fluid.optimizer.SGD(0.3).minimize(loss)
        exe = fluid.Executor()
        exe.run(startup)
        ready = run(main, loss, exe) if run else lambda feed: exe.run(main, feed, [loss])[0]
        losses = [float(np.mean(ready(feed))) for feed in feeds]
        scope = fluid.global_scope()
        return losses, {p.name: np.array(scope[p.name]) for p in main.all_parameters()}


def close(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    for name, value in left.items():
        np.testing.assert_allclose(right[name], value, rtol=2e-4, atol=1e-6, err_msg=name)


ALL = [pytest.param(name, marks=pytest.mark.grid if name == "translation" else ()) for name in NETS]


@pytest.mark.grid
@pytest.mark.parametrize("name", ALL)
def test_devices_train_as_one(name: str) -> None:
    net, draw = NETS[name]
    feeds = [draw(6, number) for number in range(STEPS)]

    def on_devices(main: fluid.Program, loss: fluid.Variable, exe: fluid.Executor) -> Any:
        with devices(2):
            made = fluid.CompiledProgram(main).with_data_parallel(loss_name=loss.name)
        return lambda feed: exe.run(made, feed, [loss])[0]

    losses, params = train(net, feeds)
    found, trained = train(net, feeds, on_devices)
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    close(params, trained)


@pytest.mark.grid
@pytest.mark.parametrize("name", ALL)
def test_trainers_and_servers_train_as_one_process(name: str) -> None:
    net, draw = NETS[name]
    feeds = [draw(6, number) for number in range(STEPS)]

    def build() -> fluid.Variable:
        loss = net()
        fluid.optimizer.SGD(0.3).minimize(loss)
        return loss

    losses, params = train(net, feeds)
    seen = run_job(build, list(zip(*map(parts, feeds), strict=True)))
    np.testing.assert_allclose(np.mean(seen.losses, axis=0), losses, rtol=1e-4)
    for trained in seen.params:
        close(params, trained)


@pytest.mark.grid
def test_a_translator_learns() -> None:
    losses, _ = train(translation, [sentences(6, 1)] * 40)
    assert losses[-1] < losses[0] / 3
