"""The documents' samples of `DistributeTranspiler` run: each role of a job with servers, and nccl2.

A sample is the part of a script after the net, so a net is built before each. The second one has
the documents' `workers=`, another name of `trainers`, and a bracket added.
"""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from jaxfleet import fluid
from tests.fluid.nets import fresh

PSERVER = """
import os

pserver_endpoints = "{endpoints}"
trainer_endpoints = "{endpoints}"
current_endpoint = pserver_endpoints.split(",")[0]
trainer_id = 0
trainers = 4
role = os.getenv("PADDLE_TRAINING_ROLE")

t = fluid.DistributeTranspiler()
t.transpile(trainer_id, pservers=pserver_endpoints, trainers=trainers)
if role == "PSERVER":
    pserver_program = t.get_pserver_program(current_endpoint)
    pserver_startup_program = t.get_startup_program(current_endpoint, pserver_program)
elif role == "TRAINER":
    trainer_program = t.get_trainer_program()
"""

NCCL2 = """
config = fluid.DistributeTranspilerConfig()
config.mode = "nccl2"
t = fluid.DistributeTranspiler(config=config)
t.transpile(trainer_id, workers=workers, current_endpoint=curr_ep)
"""


@pytest.fixture
def endpoints() -> Iterator[list[str]]:
    """Yields two listening endpoints, since trainers wait for them."""
    with ExitStack() as stack:
        listening = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        yield [f"127.0.0.1:{one.getsockname()[1]}" for one in listening]


def run(sample: str, **given: Any) -> dict[str, Any]:
    """Returns the names that a sample defines, run after a net was built."""
    names = {"fluid": fluid, **given}
    with fresh() as (names["main"], names["startup"]):
        x, y = fluid.layers.data("x", [13]), fluid.layers.data("y", [1])
        out = fluid.layers.fc(x, 1, param_attr="w", bias_attr="b")
        loss = fluid.layers.mean(fluid.layers.square_error_cost(out, y))
        fluid.optimizer.SGD(0.1).minimize(loss)
        exec(compile(sample, "sample", "exec"), names)  # noqa: S102  # ours, a few lines above
    return names


def types(program: fluid.Program) -> list[str]:
    """Returns the operators of the first block."""
    return [op.type for op in program.global_block().ops]


def test_a_server_of_the_sample_gets_its_programs(
    monkeypatch: pytest.MonkeyPatch, endpoints: list[str]
) -> None:
    monkeypatch.setenv("PADDLE_TRAINING_ROLE", "PSERVER")
    found = run(PSERVER.format(endpoints=",".join(endpoints)))
    (serving,) = found["pserver_program"].global_block().ops
    assert serving.type == "listen_and_serv"
    assert serving.attr("endpoint") == endpoints[0]
    assert serving.attr("Fanin") == 4
    begun = {
        n for op in found["pserver_startup_program"].global_block().ops for n in op.output("Out")
    }
    assert "b" in begun
    assert "w" not in begun  # two parameters, two servers
    assert "trainer_program" not in found


def test_a_trainer_of_the_sample_gets_its_program(
    monkeypatch: pytest.MonkeyPatch, endpoints: list[str]
) -> None:
    monkeypatch.setenv("PADDLE_TRAINING_ROLE", "TRAINER")
    found = run(PSERVER.format(endpoints=",".join(endpoints)))
    assert found["trainer_program"] is found["main"]
    ops = types(found["main"])
    assert ops[-4:] == ["send_barrier", "recv", "recv", "fetch_barrier"]
    assert "sgd" not in ops
    assert "pserver_program" not in found


def test_the_workers_of_the_nccl2_sample_are_its_trainers(endpoints: list[str]) -> None:
    workers = ",".join(endpoints)  # trainer 0 waits for the other
    given = {"trainer_id": 0, "workers": workers, "curr_ep": endpoints[0]}
    found = run(NCCL2, **given)
    last = found["startup"].global_block().ops[-1]
    assert last.type == "gen_nccl_id"
    assert last.attr("trainers") == workers.split(",")
    assert last.attr("trainer_id") == 0
    assert "sgd" in types(found["main"])  # each trainer updates; the executor reduces gradients
