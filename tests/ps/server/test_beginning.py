"""Servers that start with their own program and state; trainers that end before others."""

import numpy as np
import pytest

from jaxfleet.ir import parse
from jaxfleet.ps.server import ServerOptions
from jaxfleet.ps.server.program_loader import read_plan
from jaxfleet.transport.messages import Kind
from tests.ps.server.common import (
    CACHE,
    SGD,
    SGD_GRADS,
    SGD_SHAPES,
    Bench,
    error_of,
    hello,
    sgd_after,
    sgd_grads,
    sgd_state,
)


def begun(options: ServerOptions | None = None, program: str = "abc") -> Bench:
    """Returns a server that started by itself, with both trainers present."""
    bench = Bench(options or ServerOptions(may_leave=True))
    bench.core.begin(read_plan(parse(SGD), CACHE), sgd_state(), program)
    for trainer in range(2):
        welcome = bench.one(trainer, Kind.HELLO, body=hello(trainer)).body
        assert (welcome["step"], welcome["defined"]) == (0, True)
    return bench


def test_a_server_that_begins_by_itself_trains_as_one_that_is_told() -> None:
    bench = begun()
    assert bench.pull(0, 0, *SGD_SHAPES).keys() == SGD_SHAPES.keys()
    for step in (1, 2):
        for trainer in range(2):
            bench.push(trainer, step, sgd_grads(trainer, step))
    for name, value in sgd_after(2).items():
        np.testing.assert_allclose(np.asarray(bench.core.state[name]), value, rtol=1e-6)


def test_trainers_of_another_program_are_refused() -> None:
    bench = Bench()
    bench.core.begin(read_plan(parse(SGD), CACHE), sgd_state(), "mine")
    code, text = error_of(bench.send(1, Kind.HELLO, body=hello(1)))
    assert (code, text) == ("refused", "trainer 1 reports program abc, and the server mine")


@pytest.mark.parametrize("waits", [True, False])
def test_a_trainer_that_left_is_not_waited_for_and_sends_zeros(waits: bool) -> None:
    bench = begun()
    for trainer in range(2):
        bench.push(trainer, 1, sgd_grads(trainer, 1))
    if waits:
        bench.push(0, 2, sgd_grads(0, 2))
    bench.one(1, Kind.BYE, 1)
    if not waits:
        bench.push(0, 2, sgd_grads(0, 2))
    assert bench.core.step == 2
    wanted = sgd_after(1)
    for name, found in bench.pull(0, 2, *SGD_SHAPES).items():
        alone = wanted[name] - np.float32(0.5) * sgd_grads(0, 2)[SGD_GRADS[name]]
        np.testing.assert_allclose(found, alone, rtol=1e-6)
    assert not bench.core.finished
    bench.one(0, Kind.BYE, 2)
    assert bench.core.finished


def test_what_a_trainer_sent_before_it_left_counts() -> None:
    bench = begun()
    bench.push(1, 1, sgd_grads(1, 1))
    bench.one(1, Kind.BYE, 1)
    assert bench.core.step == 0
    bench.push(0, 1, sgd_grads(0, 1))
    for name, found in bench.pull(0, 1, *SGD_SHAPES).items():
        np.testing.assert_allclose(found, sgd_after(1)[name], rtol=1e-6)


def test_a_trainer_that_comes_back_is_waited_for_again() -> None:
    bench = begun()
    bench.one(1, Kind.BYE)
    bench.push(0, 1, sgd_grads(0, 1))
    assert bench.one(1, Kind.HELLO, body=hello(1), peer=b"new").body["step"] == 1
    bench.send(1, Kind.PUSH, 2, arrays=sgd_grads(1, 2), peer=b"new")
    assert bench.core.step == 1
    bench.push(0, 2, sgd_grads(0, 2))
    assert bench.core.step == 2


def test_elsewhere_a_trainer_that_left_is_missed() -> None:
    bench = begun(ServerOptions())
    bench.one(1, Kind.BYE)
    bench.push(0, 1, sgd_grads(0, 1))
    replies = bench.send(0, Kind.PULL, 1, {"names": ["b"]}) or bench.wait(1.0)
    assert error_of(replies)[0] == "peer_lost"
