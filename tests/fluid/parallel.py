"""Helpers for tests of several devices: a small net, its batches, ways to train it."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from jaxfleet import fluid
from jaxfleet.fluid import layers
from tests.fluid.nets import fresh

Feed = dict[str, np.ndarray]
Net = Callable[[], tuple[fluid.Variable, fluid.Variable]]


@contextmanager
def devices(count: int) -> Iterator[None]:
    """Sets the number of places of the CPU; the tests' JAX has eight devices."""
    with mock.patch.dict(os.environ, {"CPU_NUM": str(count)}):
        yield


def classifier() -> tuple[fluid.Variable, fluid.Variable]:
    """Returns a loss that is a mean over rows, and the prediction."""
    x, y = fluid.data("x", [None, 6]), fluid.data("y", [None, 1], "int64")
    hidden = layers.fc(x, 8, act="tanh", param_attr="w0", bias_attr="b0")
    out = layers.fc(hidden, 3, act="softmax", param_attr="w1", bias_attr="b1")
    return layers.mean(layers.cross_entropy(out, y)), out


def batch(rows: int, seed: int = 0) -> Feed:
    random = np.random.default_rng(seed)
    y: Any = random.integers(0, 3, (rows, 1))
    return {"x": random.normal(size=(rows, 6)).astype(np.float32), "y": y}


class Trained:
    """A net in training, with its own scope and programs."""

    def __init__(self, optimizer: Callable[[], Any], net: Net = classifier) -> None:
        self.scope = fluid.Scope()
        self.exe = fluid.Executor(fluid.CPUPlace())
        with fresh() as (self.main, self.startup):
            self.main.random_seed = self.startup.random_seed = 5
            self.loss, self.out = net()
            self.test = self.main.clone(for_test=True)
            self.pairs = optimizer().minimize(self.loss)[1]
        self.exe.run(self.startup, scope=self.scope)

    def parallel(self, **options: Any) -> fluid.ParallelExecutor:
        given: dict[str, Any] = {
            "use_cuda": False,
            "loss_name": self.loss.name,
            "main_program": self.main,
            "scope": self.scope,
        }
        return fluid.ParallelExecutor(**{**given, **options})

    def parameters(self) -> dict[str, np.ndarray]:
        return {p.name: np.array(self.scope.peek(p.name)) for p in self.main.all_parameters()}


def sgd() -> Any:
    return fluid.optimizer.SGD(0.5)


def mean_of_parts(feeds: Sequence[Feed], weights: Sequence[float], steps: int) -> Trained:
    """Trains by plain SGD with the weighted gradients of parts, one by one on one device."""
    one = Trained(lambda: fluid.optimizer.SGD(0.0))
    names = [grad.name for _, grad in one.pairs]
    for _ in range(steps):
        found = [one.exe.run(one.main, feed, names, scope=one.scope) for feed in feeds]
        for place, (param, _) in enumerate(one.pairs):
            total = sum(w * grads[place] for w, grads in zip(weights, found, strict=True))
            one.scope[param.name] = np.asarray(one.scope[param.name]) - 0.5 * total
    return one
