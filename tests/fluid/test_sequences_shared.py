"""Sequences on several devices, and on trainers of parameter servers."""

from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import RaggedError
from jaxfleet.fluid import layers
from tests.fluid.parallel import Trained, devices, sgd
from tests.fluid.pserver.jobs import run_alone, run_job

CLOSE: Any = {"rtol": 2e-5, "atol": 1e-6}  # sums over devices have another order
WORDS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10, 11, 12, 13, 14, 15]]
FEED: Any = {"words": WORDS, "y": np.asarray([[0], [1], [1], [0]])}


def classifier() -> tuple[fluid.Variable, fluid.Variable]:
    words = layers.data("words", [1], dtype="int64", lod_level=1)
    y = layers.data("y", [1], dtype="int64")
    rows = layers.embedding(words, [20, 4], param_attr="table")
    pooled = layers.sequence_pool(layers.fc(rows, 3, act="tanh", param_attr="w"), "sqrt")
    out = layers.fc(pooled, 2, act="softmax", param_attr="v")
    return layers.mean(layers.cross_entropy(out, y)), out


@pytest.mark.grid
def test_devices_that_share_sequences_train_as_one() -> None:
    one, two = Trained(sgd, classifier), Trained(sgd, classifier)
    with devices(2):
        parallel = two.parallel()
    halves = [{"words": WORDS[:2], "y": FEED["y"][:2]}, {"words": WORDS[2:], "y": FEED["y"][2:]}]
    for feed in (FEED, halves):
        (loss,) = one.exe.run(one.main, FEED, [one.loss], scope=one.scope)
        losses, out = parallel.run([two.loss, two.out.name], feed)
        np.testing.assert_allclose(losses.mean(), loss[0], **CLOSE)
        assert out.shape == (4, 2)
    for name, value in one.parameters().items():
        np.testing.assert_allclose(two.parameters()[name], value, err_msg=name, **CLOSE)
    with pytest.raises(RaggedError, match="of whose sequences each device has some"):
        parallel.run(["words"], FEED)


@pytest.mark.grid
def test_trainers_with_servers_train_on_sequences_as_one_process() -> None:
    def net() -> fluid.Variable:
        loss, _ = classifier()
        fluid.optimizer.SGD(0.1).minimize(loss)
        return loss

    halves = [{"words": WORDS[at : at + 2], "y": FEED["y"][at : at + 2]} for at in (0, 2)]
    given: Any = [[half] * 2 for half in halves]
    job = run_job(net, given)
    alone = run_alone(net, [FEED] * 2)
    np.testing.assert_allclose(np.mean(job.losses, 0), alone.losses[0], **CLOSE)
