"""Time of `Executor.run` of a fluid program, against the same step by `jf.distribute`.

    python benchmarks/executor.py [--quick]

The step trains an MLP of three layers with momentum on numpy rows, and returns the loss to the
script. Both sides begin with the same parameters, give the same results, which is checked, and wait
for every step. They differ in the work around XLA: feeds that are checked and narrowed, state
looked up by name in a scope, the fetch as a numpy array. The bar is 1.10 times `jf.distribute` on
one device, plus the spread of that against itself. `--devices 4` is for the curious, without a bar:
the program then runs by `ParallelExecutor`, whose devices share the rows and receive copies of
numpy's memory.
"""

import itertools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Bar, Plan, Side, compare, print_table, run

import jaxfleet as jf
from jaxfleet import fluid

SIZES = (784, 256, 256, 10)
ROWS = 128
HEADS = ("", "jf.distribute, ms", "fluid, ms", "ratio", "jf/itself")


def measure(devices: int, plan: Plan) -> list[Bar]:
    os.environ["CPU_NUM"] = str(devices)
    random = np.random.default_rng(0)
    weights = [random.normal(size=s) * 0.05 for s in itertools.pairwise(SIZES)]
    weights = [w.astype(np.float32) for w in weights]
    rows = random.normal(size=(ROWS, SIZES[0])).astype(np.float32)
    labels: Any = random.integers(0, SIZES[-1], (ROWS, 1))
    feed = {"x": rows, "y": labels}
    check_alike(distributed(weights, feed), in_fluid(weights, feed, devices), steps=5)
    ours, again = (Side(*distributed(weights, feed), waits=devices > 1) for _ in range(2))
    theirs = Side(*in_fluid(weights, feed, devices), waits=True)
    times = compare(ours, theirs, again, plan)
    where = f"MLP, {ROWS} rows, on {devices} device{'s' * (devices > 1)}"
    shown = (f"{times.baseline_ms:.2f}", f"{times.candidate_ms:.2f}", f"{times.ratio:.3f}")
    print_table(HEADS, [(where, *shown, "{:.3f} to {:.3f}".format(*times.itself))])
    if devices > 1:
        return []
    return [Bar(f"{where}: Executor.run over jf.distribute", times.ratio, 1.10, times.spread)]


def distributed(weights: list[np.ndarray], feed: dict[str, np.ndarray]) -> tuple[Any, Any, Any]:
    """Returns the step by `jf.distribute`, with its state and its batch."""
    tx = jf.distributed_optimizer(optax.sgd(0.01, momentum=0.9))

    def loss_of(params: Any, batch: Any) -> jax.Array:
        hidden = batch["x"]
        for place, (weight, bias) in enumerate(params):
            hidden = hidden @ weight + bias
            hidden = jax.nn.relu(hidden) if place < len(params) - 1 else hidden
        labels = batch["y"][:, 0]
        return optax.softmax_cross_entropy_with_integer_labels(hidden, labels).mean()

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    params = [(jnp.asarray(w), jnp.zeros(w.shape[1])) for w in weights]
    state = {"params": params, "opt": tx.init(params)}
    batch = {"x": feed["x"], "y": feed["y"].astype(np.int32)}
    step = jf.distribute(train_step, example=(state, batch), strategy="collective")
    assert isinstance(step, jf.Step)
    state, _ = step(jax.tree.map(lambda leaf: leaf.copy(), state), batch)
    return step, state, batch


def in_fluid(
    weights: list[np.ndarray], feed: dict[str, np.ndarray], devices: int
) -> tuple[Any, Any, Any]:
    """Returns the step by an executor, with the same signature: its state is in a scope."""
    layers, scope = fluid.layers, fluid.Scope()
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup), fluid.unique_name.guard():
        hidden, label = fluid.data("x", [None, SIZES[0]]), fluid.data("y", [None, 1], "int64")
        for place, weight in enumerate(weights):
            act = "relu" if place < len(weights) - 1 else None
            begin = fluid.ParamAttr(f"w{place}", fluid.initializer.NumpyArrayInitializer(weight))
            hidden = layers.fc(hidden, weight.shape[1], act=act, param_attr=begin)
        each = layers.softmax_with_cross_entropy(hidden, label)
        assert isinstance(each, fluid.Variable)
        loss = layers.mean(each)
        fluid.optimizer.Momentum(0.01, 0.9).minimize(loss)
    exe = fluid.Executor(fluid.CPUPlace())
    exe.run(startup, scope=scope)
    parallel = fluid.ParallelExecutor(False, loss.name, main, scope=scope) if devices > 1 else None

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        if parallel is not None:
            return state, parallel.run([loss], batch)[0]
        return state, exe.run(main, batch, [loss], scope=scope)[0]

    step({}, feed)
    return step, {}, feed


def check_alike(ours: tuple[Any, Any, Any], theirs: tuple[Any, Any, Any], *, steps: int) -> None:
    """Rejects steps with different results."""
    (step, state, batch), (run_, _, feed) = ours, theirs
    for _ in range(steps):
        state, loss = step(state, batch)
        _, found = run_({}, feed)
        np.testing.assert_allclose(np.mean(found), float(loss), rtol=1e-3)


if __name__ == "__main__":
    run("executor", __file__, measure, device_counts=(1,))
