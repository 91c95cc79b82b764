"""`step.view`, and what dumps of steps have for `jaxfleet view`."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.env import PserverRole, dumping_to
from jaxfleet.report import read_folders
from jaxfleet.runtime import step_introspection
from jaxfleet.runtime.pserver_entry import ServerStep
from tests.runtime.toys import distributed, rows, start, training


def programs_in(path: Path) -> list[Any]:
    page = path.read_text()
    (data,) = re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)
    found: list[Any] = json.loads(data)["programs"]
    return found


def test_a_step_writes_a_report_of_itself(tmp_path: Path) -> None:
    step, _ = distributed()
    assert step.view(tmp_path / "step.html") == tmp_path / "step.html"
    (program,) = programs_in(tmp_path / "step.html")
    assert program["decisions"] == step.explain().splitlines()
    assert [stage["name"] for stage in program["stages"]] == [x.name for x in step.dumps]
    assert ["strategy.mode", "collective"] in program["facts"]
    (file, *_) = program["files"]
    assert file[1], "the user's lines"
    assert program["memory"]


@pytest.mark.grid
def test_a_measured_step_shows_predicted_and_measured_time(tmp_path: Path) -> None:
    step, state = distributed()
    before = jax.tree_util.tree_map(np.array, state)
    step.view(tmp_path / "step.html", measure=3)
    (program,) = programs_in(tmp_path / "step.html")
    assert program["measured"]["calls"] == 3
    assert program["measured"]["step_s"] > 0
    assert program["measured"]["flops_per_s"] > 1e6
    assert program["measured"]["bytes_per_s"] > 1e6
    assert min(program["work"]) > 0
    jax.tree_util.tree_map(np.testing.assert_array_equal, before, state)
    twin, other = distributed()
    one, two = step(state, rows(8)), twin(other, rows(8))  # the measured step trains as any
    jax.tree_util.tree_map(np.testing.assert_array_equal, one, two)


@pytest.mark.grid
def test_a_step_that_holds_more_than_its_state_is_measured_apart(tmp_path: Path) -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))
    apart = jf.DistributedStrategy(communication="local_sgd")

    def made() -> jf.Step[Any, Any]:
        step = jf.distribute(training(tx), (start(tx), rows(8)), strategy=apart)
        assert isinstance(step, jf.Step)
        return step

    step, twin = made(), made()
    state, other = start(tx), start(tx)
    state, _ = step(state, rows(8))
    other, _ = twin(other, rows(8))
    step.view(tmp_path / "step.html", measure=3)
    (program,) = programs_in(tmp_path / "step.html")
    assert program["measured"]["step_s"] > 0
    assert program["measured"]["calls"] == 3
    one, two = step.pull(step(state, rows(8))[0]), twin.pull(twin(other, rows(8))[0])
    jax.tree_util.tree_map(np.testing.assert_array_equal, one, two)


def test_a_step_of_several_executables_is_measured(tmp_path: Path) -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))
    fitted = jf.DistributedStrategy(mode="single", passes="recompute")
    step = jf.distribute(training(tx), (start(tx), rows(8)), strategy=fitted)
    assert isinstance(step, jf.Step)
    assert "cut" in {op.type for op in step.program.root.ops}
    step.view(tmp_path / "step.html", measure=2)
    (program,) = programs_in(tmp_path / "step.html")
    assert program["measured"]["step_s"] > 0


def test_a_step_that_looks_up_tables_is_measured_with_tables_of_its_own(tmp_path: Path) -> None:
    users = jf.embedding_table("users", 3, optimizer=jf.tables.Sgd(0.1))
    tx = jf.distributed_optimizer(optax.sgd(0.1))

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss_of(params: Any) -> Any:
            return jnp.mean(jnp.square(users(params["users"], batch["id"]) - 1.0))

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    params, batch = {"users": users.init()}, {"id": np.arange(1, 9, dtype=np.int32)}
    example = ({"params": params, "opt": tx.init(params)}, batch)
    step = jf.distribute(train_step, example, "single")
    assert isinstance(step, jf.Step)
    step(*example)
    before = step.look_up("users", [0, *batch["id"]])
    step.view(tmp_path / "step.html", measure=2)
    (program,) = programs_in(tmp_path / "step.html")
    assert program["measured"]["step_s"] > 0
    assert "keys are zeros" in program["measured"]["note"]
    np.testing.assert_array_equal(step.look_up("users", [0, *batch["id"]]), before)


def test_a_step_that_cannot_be_measured_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, _ = distributed()

    def refuse(_: Any) -> Any:
        raise TypeError("no zeros of this type")

    monkeypatch.setattr(step_introspection, "zeros", refuse)
    step.view(tmp_path / "step.html", measure=3)
    (program,) = programs_in(tmp_path / "step.html")
    assert program["measured"]["step_s"] is None
    assert program["measured"]["why_not"] == "no zeros of this type"


def test_a_step_that_ran_shows_the_memory_that_xla_counts(tmp_path: Path) -> None:
    step, state = distributed()
    step.view(tmp_path / "before.html")
    (program,) = programs_in(tmp_path / "before.html")
    assert program["memory"][-1]["xla"] == -1
    assert program["measured"] is None
    step(state, rows(8))
    step.view(tmp_path / "after.html")
    (program,) = programs_in(tmp_path / "after.html")
    assert program["memory"][-1]["xla"] == step.memory_report().after_bytes


def test_a_trainer_writes_a_report_of_its_job(tmp_path: Path) -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))
    twin = jf.Twin(training(tx), (start(tx), rows(8)), servers=2, trainers=2)

    def script(step: Any) -> tuple[Any, tuple[Any, ...]]:
        if step.client.me.trainer == 0:
            step.view(tmp_path / "job.html", measure=4)
        state, metrics = step(start(tx), rows(8))
        for _ in range(3):
            state, metrics = step(state, rows(8))
        if step.client.me.trainer == 0:
            step.view(tmp_path / "ran.html", measure=2)
            peaks.append(step.memory_report().after_bytes)
        return step.pull(state), (metrics,)

    peaks: list[int] = []

    result = twin.play(script)
    programs = programs_in(tmp_path / "job.html")
    assert [program["role"] for program in programs] == ["trainer", "server", "server"]
    before = programs[0]["measured"]
    assert before["step_s"] > 0
    assert before["of"] == "its compiled blocks, without messages"
    assert (before["calls"], before["steps"], before["parts"]) == (4, 0, [])
    assert "No step has run since the first" in before["note"]
    assert any("2 servers" in line for line in programs[0]["decisions"])
    updates = [step for journey in programs[0]["journeys"] for step in journey[3]]
    assert {"slice", "send", "update", "receive"} <= {step[0] for step in updates}
    (ran, *_) = programs_in(tmp_path / "ran.html")
    assert ran["memory"][-1]["xla"] == peaks[0]
    assert ran["measured"]["steps"] == 2  # of the three behind the first
    (whole, *parts) = ran["measured"]["parts"]
    assert whole["what"] == "a step of training"
    names = [part["what"].split(":")[0] for part in parts]
    assert names[:3] == ["computing", "messages", "waiting for servers"]
    assert names[-2:] == ["server 0", "server 1"]
    assert all(part["seconds"] > 0 for part in (whole, parts[0], *parts[-2:]))
    assert sum(part["seconds"] for part in parts[:3]) <= 3 * whole["seconds"]  # each a median
    plain = twin.run(start(tx), [rows(8)] * 4)  # a view trains nothing
    jax.tree_util.tree_map(np.testing.assert_array_equal, result.states[0], plain.states[0])


def test_a_trainers_dump_has_its_times_once_it_has_trained(tmp_path: Path) -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))
    twin = jf.Twin(training(tx), (start(tx), rows(8)), servers=1, trainers=1)
    for steps, timed in ((2, 0), (3, 1)):
        folder = tmp_path / str(steps)
        with dumping_to(folder, measure=1):
            twin.run(start(tx), [rows(8)] * steps)
        (found,) = [one.measured for one in read_folders(folder) if one.measured is not None]
        assert found.step_s is not None, found.why_not
        assert (found.calls, found.steps) == (1, timed)
        assert len(found.parts) == 6 * timed  # the whole, four kinds of work, and the server


def test_a_server_writes_a_report_of_its_program(tmp_path: Path) -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))
    captured = jf.capture(training(tx), example=(start(tx), rows(8)))
    endpoints = ("127.0.0.1:6174", "127.0.0.1:6175")
    cluster = PserverRole("pserver", 2, endpoints, current_endpoint=endpoints[1])
    step: ServerStep[Any, Any] = ServerStep(
        captured, jf.DistributedStrategy(mode="pserver"), cluster
    )
    step.view(tmp_path / "server.html", measure=4)
    (program,) = programs_in(tmp_path / "server.html")
    assert program["role"] == "server"
    assert program["endpoint"] == endpoints[1]
    assert program["decisions"] == [step.explain()]
    assert "a server calls no step" in program["unmeasured"]


def test_a_dump_of_a_step_has_its_decisions_and_lines(tmp_path: Path) -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))
    step = jf.distribute(training(tx), (start(tx), rows(8)), "single", dump_dir=tmp_path)
    assert isinstance(step, jf.Step)
    (found,) = read_folders(tmp_path)
    assert list(found.decisions) == step.explain().splitlines()
    assert found.rows == 8
    assert [stage.name for stage in found.stages] == [stage.name for stage in step.dumps]
    assert any("def " in text for lines in found.sources.values() for text in lines.values())
