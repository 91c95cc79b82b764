"""One script, unchanged, in every mode and in every process of a job."""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.env import PserverRole, cluster_environment
from jaxfleet.runtime import ServerStep, TrainerStep
from tests.faults.cluster import Jobs

BATCH = {"x": np.eye(8, dtype=np.float32), "y": np.arange(8, dtype=np.float32)}
TX = jf.distributed_optimizer(optax.adam(0.1))

# The script of a job's processes: it resumes from a checkpoint, and writes its final state.
SCRIPT = """
import sys
import jaxfleet as jf
from tests.runtime.test_one_script import BATCH, start, train_step, trained

print("begins", flush=True)
step = jf.distribute(train_step, (start(), BATCH), "pserver")
trained(step, sys.argv[1], sys.argv[2])
print("never said by a server", flush=True)
"""


def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    def loss_fn(w: Any) -> Any:
        return ((batch["x"] @ w - batch["y"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state["w"])
    updates, opt = TX.update(grads, state["opt"], state["w"])
    return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, loss


def start() -> Any:
    w = jax.numpy.zeros(8)
    return {"w": w, "opt": TX.init(w)}


def trained(step: Any, before: str | Path, after: str | Path) -> Any:
    """Resumes from one checkpoint and saves the next: the script that is the same in every mode."""
    with step:
        state = step.restore(before)
        for _ in range(3):
            state, _ = step(state, BATCH)
        step.save(after, state)
        return step.pull(state)


def begun(folder: Path) -> Path:
    """Returns a checkpoint to resume from."""
    alone = jf.distribute(train_step, (start(), BATCH), "single")
    assert isinstance(alone, jf.Step)
    alone.save(folder / "before", start())
    return folder / "before"


def assert_near(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found, wanted)


def test_a_script_is_the_same_on_one_device_on_several_and_in_a_job(tmp_path: Path) -> None:
    before = begun(tmp_path)
    alone = trained(jf.distribute(train_step, (start(), BATCH), "single"), before, tmp_path / "1")
    several = jf.distribute(train_step, (start(), BATCH), "collective")
    assert_near(trained(several, before, tmp_path / "2"), alone)

    def script(step: TrainerStep) -> tuple[Any, tuple[Any, ...]]:
        return trained(step, before, tmp_path / "3"), ()

    job = jf.Twin(train_step, (start(), BATCH)).play(script)
    assert_near(job.states[1], alone)


METHODS = {name for name, value in vars(jf.TrainingStep).items() if callable(value)}
CALLS = {name for name in METHODS if not name.startswith("_")} - {"explain", "view", "close"}


@pytest.mark.parametrize("call", ["__call__", *sorted(CALLS)])
def test_whatever_a_script_asks_of_a_server_first_makes_it_serve(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = "127.0.0.1:6174"
    cluster = PserverRole(role="pserver", trainers=1, endpoints=(here,), current_endpoint=here)
    for name, value in cluster_environment(cluster).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ServerStep, "serve", lambda _: 7)
    step = jf.distribute(train_step, (start(), BATCH), "pserver")
    with pytest.raises(SystemExit) as ended, step:
        getattr(step, call)("something")
    assert ended.value.code == 7


@pytest.mark.grid
@pytest.mark.processes
def test_a_script_started_as_a_server_serves_where_it_restores(tmp_path: Path) -> None:
    before = begun(tmp_path)
    alone = trained(jf.distribute(train_step, (start(), BATCH), "single"), before, tmp_path / "1")
    script, after = tmp_path / "script.py", tmp_path / "after"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(before), str(after)]
    with Jobs(tmp_path / "job", trainers=1) as jobs:
        endpoint = jobs.endpoints[0]
        as_server = jobs.cluster(role="pserver", current_endpoint=endpoint)
        server = jobs.start("server 0", command, as_server)
        trainer = jobs.start("trainer 0", command, jobs.cluster(trainer_id=0))
        assert (trainer.ends(), server.ends()) == (0, 0)
        assert "never said by a server" in trainer.text()
        assert "begins" in server.text()
        assert "never said" not in server.text()
    step = jf.distribute(train_step, (start(), BATCH), "single")
    assert isinstance(step, jf.Step)
    assert_near(step.restore(after), alone)


def test_a_trainer_ends_at_its_first_step_where_only_dumps_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JAXFLEET_DUMP_UNTIL_COMPILED", "1")
    twin = jf.Twin(train_step, (start(), BATCH), servers=1, trainers=1)
    with pytest.raises(SystemExit) as ended:
        twin.run(start(), [BATCH])
    assert ended.value.code == 0
