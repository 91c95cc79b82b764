"""Executors of trainers and servers: any optimizer trains on servers as in one process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.env import dumping_to
from jaxfleet.errors import ClosedError, FeedError, ProgramError
from jaxfleet.fluid import layers
from jaxfleet.report import read_folders
from tests.fluid.pserver.jobs import Build, Feed, Script, run_alone, run_job, shared_out
from tests.fluid.pserver.memory import Job

IN, HIDDEN, ROWS, STEPS = 33, 512, 8, 4  # 16896 weights, so two servers have some of them each


def net(make: Callable[[], Any], **attrs: Any) -> fluid.Variable:
    """Returns the loss of a small net that an optimizer updates."""
    x, y = layers.data("x", [IN]), layers.data("y", [1])
    w = fluid.ParamAttr("w", **attrs)
    hidden = layers.fc(x, HIDDEN, act="tanh", param_attr=w, bias_attr=False)
    loss = layers.mean(layers.square_error_cost(layers.fc(hidden, 1), y))
    make().minimize(loss)
    return loss


def batches(steps: int = STEPS) -> list[Feed]:
    random = np.random.default_rng(3)
    found: list[Feed] = []
    for _ in range(steps):
        x = random.normal(size=(ROWS, IN)).astype(np.float32)
        found.append({"x": x, "y": x[:, :1] - x[:, 1:2]})
    return found


def check_same(build: Build, fed: list[Feed], *, rtol: float = 1e-4, **more: Any) -> None:
    """Checks that a job of two trainers gives the losses and parameters of one process."""
    job, alone = run_job(build, shared_out(fed, 2), **more), run_alone(build, fed)
    np.testing.assert_allclose(np.mean(job.losses, 0), alone.losses[0], rtol=rtol)
    for name, value in alone.params[0].items():
        for params in job.params:
            np.testing.assert_allclose(params[name], value, rtol=1e-3, atol=1e-5, err_msg=name)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "rmsprop": lambda: fluid.optimizer.RMSProp(0.01),
    "decayed": lambda: fluid.optimizer.DecayedAdagrad(
        layers.exponential_decay(0.01, 2, 0.5, staircase=True)
    ),
    "adamax": lambda: fluid.optimizer.Adamax(0.01),
    "ftrl": lambda: fluid.optimizer.Ftrl(0.1),
    "nesterov": lambda: fluid.optimizer.Momentum(
        layers.piecewise_decay([1, 3], [0.01, 0.001, 0.02]),
        0.9,
        use_nesterov=True,
        regularization=fluid.regularizer.L1Decay(0.01),
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_trains_on_servers_as_in_one_process(name: str) -> None:
    check_same(partial(net, OPTIMIZERS[name]), batches())


def test_a_rate_of_a_parameters_own() -> None:
    check_same(partial(net, lambda: fluid.optimizer.Adam(0.01), learning_rate=0.5), batches())


@pytest.mark.grid
def test_any_number_of_servers_begins_with_the_bits_of_one_process_and_ends_with_the_same() -> None:
    build = partial(net, lambda: fluid.optimizer.Adam(0.01))
    fed = shared_out(batches(3), 2)
    begins, jobs = (
        run_alone(build, []).begun[0],
        [run_job(build, fed, servers=n) for n in (1, 2, 3)],
    )
    assert begins["w"].std() > 0
    for job in jobs:
        for trainer in range(2):
            for name, value in begins.items():
                np.testing.assert_array_equal(job.begun[trainer][name], value)
                np.testing.assert_array_equal(job.params[trainer][name], jobs[0].params[0][name])


def test_one_trainer_trains_as_one_process() -> None:
    build, fed = partial(net, lambda: fluid.optimizer.Adam(0.01)), batches()
    job, alone = run_job(build, [fed]), run_alone(build, fed)
    np.testing.assert_allclose(job.losses, alone.losses, rtol=1e-5)


@pytest.mark.grid
def test_a_trainer_is_timed_for_its_dump_and_trains_as_before(tmp_path: Path) -> None:
    build, fed = partial(net, lambda: fluid.optimizer.SGD(0.01)), batches(5)
    with dumping_to(tmp_path, measure=2):
        job = run_job(build, [fed], servers=1)
    assert job.losses == run_job(build, [fed], servers=1).losses
    (timed,) = [one.measured for one in read_folders(tmp_path) if one.measured is not None]
    assert (timed.calls, timed.steps) == (2, 2)
    assert timed.step_s is not None, timed.why_not
    assert timed.step_s > 0
    assert timed.of == "its compiled blocks, without messages"
    whole, computing, messages, waiting, _, server = timed.parts
    assert whole.seconds >= max(computing.seconds, messages.seconds, waiting.seconds)
    assert min(computing.seconds, messages.seconds, server.seconds) > 0


def test_servers_keep_their_last_state_in_their_scopes() -> None:
    job = run_job(
        partial(net, lambda: fluid.optimizer.Momentum(0.1, 0.9)), shared_out(batches(), 2)
    )
    parts = {n: np.asarray(v) for scope in job.scopes for n, v in scope.items() if "block" in n}
    whole = np.concatenate([parts["w.block0"], parts["w.block1"]])
    np.testing.assert_array_equal(whole, job.params[0]["w"])
    np.testing.assert_array_equal(job.params[0]["w"], job.params[1]["w"])
    assert all(np.asarray(scope["w_velocity_0"]).any() for scope in job.scopes)


def test_what_only_servers_have_cannot_be_fetched() -> None:
    job = Job()
    script = Script(job, partial(net, lambda: fluid.optimizer.SGD(0.1)), ["a:1"], 1)

    def trainer() -> None:
        transpiler, startup, loss = script.transpiled()
        exe, scope = script.executor(), fluid.Scope()
        exe.run(startup, scope=scope)
        main = transpiler.get_trainer_program()
        with pytest.raises(FeedError, match="'learning_rate_0' is fetched"):
            exe.run(main, feed=batches(1)[0], fetch_list=["learning_rate_0"], scope=scope)
        with pytest.raises(FeedError, match=r"'x' .* is not fed"):
            exe.run(main, feed={}, fetch_list=[loss], scope=scope)
        grad, w = exe.run(main, feed=batches(1)[0], fetch_list=["w@GRAD", "w"], scope=scope)
        assert grad.shape == w.shape == (IN, HIDDEN)
        exe.close()
        exe.close()
        with pytest.raises(ClosedError, match="this Executor was closed"):
            exe.run(main, feed=batches(1)[0], scope=scope)

    job.run({"server 0": partial(script.serve, 0, fluid.Scope()), "trainer 0": trainer})


def test_two_executors_of_a_process_share_its_lines() -> None:
    job = Job()
    script = Script(job, partial(net, lambda: fluid.optimizer.SGD(0.1)), ["a:1"], 1)

    def trainer() -> None:
        transpiler, startup, loss = script.transpiled()
        first, second, scope = script.executor(), script.executor(), fluid.Scope()
        second._pserver.connections = first._pserver.connections
        first.run(startup, scope=scope)
        main = transpiler.get_trainer_program()
        second.run(main, feed=batches(1)[0], fetch_list=[loss], scope=scope)
        first.close()
        with pytest.raises(ClosedError, match="trainer 0 has closed"):
            second.run(main, feed=batches(1)[0], fetch_list=[loss], scope=scope)
        second.close()

    job.run({"server 0": partial(script.serve, 0, fluid.Scope()), "trainer 0": trainer})


def test_a_trainers_program_is_for_one_device() -> None:
    script = Script(Job(), partial(net, lambda: fluid.optimizer.SGD(0.1)), ["a:1"], 1)
    transpiler, _, loss = script.transpiled()
    compiled, exe = fluid.CompiledProgram(transpiler.get_trainer_program()), script.executor()
    several = compiled.with_data_parallel(loss_name=loss.name, places=fluid.cpu_places(2))
    with pytest.raises(ProgramError, match="runs on one device, and is compiled for several"):
        exe.run(several, feed=batches(1)[0], scope=fluid.Scope())
