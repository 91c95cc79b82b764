"""The recorded collective programs run with one device per rank, against one device.

All 41 run on eight devices, as in these tests. Most of them run with `-m grid`. They have narrower
layers, and the same operators in the same order. Ranks that sum gradients match one device on all
their rows; ranks that train by themselves match the mean over one device on the rows of each. Sums
of other rows round differently, so gradients differ by some ULPs; the effect on a parameter depends
on the optimizer, and Adam divides by them.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from tests.fluid.nets import built
from tests.fluid.recorded import Case
from tests.fluid.test_collective_cases import CASES, id_of, transpiled

Values = dict[str, np.ndarray]
Key = tuple[str, str, str, int]

PART = 100  # of a layer's size
ROWS = 4  # of a batch: on one device, on all ranks that sum gradients, on each that trains alone
RATES = {"sgd": 0.1, "sgd_l2": 0.1, "adam": 0.001}
CLOSE = {"sgd": 1e-6, "sgd_l2": 1e-6, "adam": 1e-5}  # of parameters that are about 1
QUICK = (
    "fc1-sgd-GradAllReduce-2-2",
    "fc1-adam-LocalSGD-1-4",
    "fc1-sgd_l2-SingleProcessMultiThread-4",
    "mlp-adam-GradAllReduce-1-2",
    "mlp-sgd_l2-LocalSGD-1-4",
    "mlp-sgd-SingleProcessMultiThread-2",
    "ctr-sgd_l2-GradAllReduce-1-2",
    "ctr-sgd-LocalSGD-1-2",
    "ctr-adam-SingleProcessMultiThread-2",
)
EXECUTOR = fluid.Executor()


def state_of(program: fluid.Program, rate: float) -> Values:
    """Draws the initial values of persistable variables."""
    random = np.random.default_rng(0)
    found = {}
    for variable in program.list_vars():
        if variable.persistable:
            drawn = random.normal(size=variable.shape) * 0.5
            found[variable.name] = _begun(variable.name, drawn, rate).astype(np.float32)
    return found


def _begun(name: str, drawn: np.ndarray, rate: float) -> np.ndarray:
    begins = {"learning_rate": rate, "beta1_pow": 0.9, "beta2_pow": 0.999, "moment": 0.0}
    value = next((value for part, value in begins.items() if part in name), None)
    return drawn if value is None else np.full(drawn.shape, value)


def feed_of(program: fluid.Program, rows: int) -> Values:
    random = np.random.default_rng(1)
    found = {}
    for variable in program.list_vars():
        if variable.is_data:
            shape = (rows, *variable.shape[1:])
            drawn = random.normal(size=shape), random.integers(0, 2, shape)
            found[variable.name] = drawn[variable.dtype == "int64"].astype(variable.dtype)
    return found


def rows_of(feed: Values, rank: int) -> Values:
    return {name: value[rank * ROWS : (rank + 1) * ROWS] for name, value in feed.items()}


def step(main: fluid.Program, state: Values, feed: Values) -> Values:
    scope = fluid.Scope()
    scope.update(state)
    EXECUTOR.run(main, feed, scope=scope)
    return {name: np.asarray(scope[name]) for name in state}


@cache
def alone(net: str, optimizer: str) -> tuple[fluid.Program, Values]:
    """Returns the program of one device, and its initial state."""
    main, _ = built(net, optimizer, part=PART)
    return main, state_of(main, RATES[optimizer])


def key_of(case: Case) -> Key:
    """Returns the parts of a case that determine its results: rings do not."""
    return case["net"], case["optimizer"], case["mode"], case["nranks"]


@cache
def wanted_of(key: Key) -> Values:
    """Returns the state after two steps on one device, or the mean of the ranks' parameters."""
    net, optimizer, mode, ranks = key
    main, state = alone(net, optimizer)
    if mode != "LocalSGD":
        feed = feed_of(main, ROWS)
        return step(main, step(main, state, feed), feed)
    feed, params = feed_of(main, ROWS * ranks), [p.name for p in main.all_parameters()]
    states = [state] * ranks
    for _ in range(2):
        states = [step(main, s, rows_of(feed, rank)) for rank, s in enumerate(states)]
        mean = {name: np.mean([s[name] for s in states], axis=0) for name in params}
        states = [{**s, **mean} for s in states]
    return {name: states[0][name] for name in params}


@cache
def found_of(key: Key) -> Values:
    """Returns the state after two steps of a case's transpiled program."""
    net, optimizer, mode, ranks = key
    case = next(case for case in CASES if key_of(case) == key)
    main, _ = transpiled(case, part=PART)
    assert [op.type for op in main.global_block().ops] == [op["type"] for op in case["main"]]
    _, state = alone(net, optimizer)
    scope = fluid.Scope()
    scope.update({**state, **{f"{name}@SNAPSHOT": value for name, value in state.items()}})
    feed = feed_of(main, ROWS * (ranks if mode == "LocalSGD" else 1))
    for _ in range(2):
        EXECUTOR.run(main, feed, scope=scope)
    return {name: np.asarray(scope[name]) for name in state}


def marked(case: Case) -> Any:
    marks = [] if id_of(case) in QUICK else [pytest.mark.grid]
    return pytest.param(case, marks=marks, id=id_of(case))


def test_what_runs_by_default_has_every_net_with_every_mode_and_every_optimizer() -> None:
    quick = [case for case in CASES if id_of(case) in QUICK]
    assert len(quick) == len(QUICK)
    for one, two in (("net", "mode"), ("net", "optimizer"), ("mode", "optimizer")):
        pairs = {(case[one], case[two]) for case in CASES}
        assert {(case[one], case[two]) for case in quick} == pairs


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_ranks_do_what_one_device_does(case: Case) -> None:
    found, wanted = found_of(key_of(case)), wanted_of(key_of(case))
    close = CLOSE[case["optimizer"]]
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=close, atol=close, err_msg=name)
