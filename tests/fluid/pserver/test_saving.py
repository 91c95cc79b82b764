"""The first trainer saves a job with servers, which resumes from there as a job or alone."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import ProgramError, SavedError
from jaxfleet.fluid import io
from tests.fluid.nets import fresh
from tests.fluid.pserver.jobs import Feed, Script, shared_out
from tests.fluid.pserver.memory import Job
from tests.fluid.pserver.test_executors import batches, net

STEPS = 4
BUILD = partial(net, lambda: fluid.optimizer.Adam(0.01))
SCHEDULED = partial(
    net,
    lambda: fluid.optimizer.SGD(fluid.layers.exponential_decay(0.1, decay_steps=1, decay_rate=0.5)),
)


def run(
    folder: Path,
    feeds: Sequence[Sequence[Feed]],
    *,
    save_at: int,
    load: bool,
    build: Callable[[], fluid.Variable] = BUILD,
) -> Any:
    """Trains, and returns each trainer's losses; saves before a step, or loads at the beginning."""
    job, endpoints = Job(), ["127.0.0.1:7301", "127.0.0.1:7302"]
    script = Script(job, build, endpoints, 2)

    def server(number: int) -> None:
        main, startup = script.transpiled()[0].get_pserver_programs(endpoints[number])
        exe, scope = script.executor(), fluid.Scope()
        exe.run(startup, scope=scope)
        if load:
            with fluid.scope_guard(scope):
                io.load_persistables(exe, folder, main)
        exe.run(main, scope=scope)

    def trainer(number: int) -> list[float]:
        transpiler, startup, loss = script.transpiled(number)
        main, exe, scope = transpiler.get_trainer_program(), script.executor(), fluid.Scope()
        exe.run(startup, scope=scope)
        losses = []
        for step, fed in enumerate(feeds[number]):
            if step == save_at and number == 0:
                with fluid.scope_guard(scope):
                    io.save_persistables(exe, folder, main)
            found = exe.run(main, feed=dict(fed), fetch_list=[loss], scope=scope)
            losses.append(float(found[0][0]))
        exe.close()
        return losses

    people: dict[str, Callable[[], Any]] = {f"server {n}": partial(server, n) for n in range(2)}
    people |= {f"trainer {n}": partial(trainer, n) for n in range(2)}
    done = job.run(people)
    return [done[f"trainer {n}"] for n in range(2)]


@pytest.mark.few(1)
@pytest.mark.parametrize("build", [BUILD, SCHEDULED], ids=["rate", "schedule"])
def test_a_loaded_job_continues_with_the_same_bits(
    tmp_path: Path, build: Callable[[], fluid.Variable]
) -> None:
    feeds = shared_out(batches(STEPS), 2)
    whole = run(tmp_path, feeds, save_at=2, load=False, build=build)
    rest = run(tmp_path, [fed[2:] for fed in feeds], save_at=-1, load=True, build=build)
    assert rest == [losses[2:] for losses in whole]


@pytest.mark.grid
@pytest.mark.parametrize("build", [BUILD, SCHEDULED], ids=["rate", "schedule"])
def test_one_process_goes_on_from_what_a_job_has_saved(
    tmp_path: Path, build: Callable[[], fluid.Variable]
) -> None:
    fed = batches(STEPS)
    whole = np.mean(run(tmp_path, shared_out(fed, 2), save_at=2, load=False, build=build), 0)
    exe, scope = fluid.Executor(fluid.CPUPlace()), fluid.Scope()
    with fresh() as (main, startup), fluid.scope_guard(scope):
        loss = build()
        exe.run(startup)
        io.load_persistables(exe, tmp_path, main)
        rest = [float(exe.run(main, feed=dict(x), fetch_list=[loss])[0][0]) for x in fed[2:]]
    np.testing.assert_allclose(rest, whole[2:], rtol=1e-5)


def test_who_has_not_spoken_with_servers_cannot_save_what_they_hold(tmp_path: Path) -> None:
    script = Script(Job(), BUILD, ["a:1", "b:2"], 2)
    main, exe = script.transpiled()[0].get_trainer_program(), script.executor()
    with pytest.raises(ProgramError, match="has not connected to the servers"):
        io.save_persistables(exe, tmp_path, main)


def test_a_server_is_told_what_is_not_saved(tmp_path: Path) -> None:
    script = Script(Job(), BUILD, ["a:1", "b:2"], 2)
    main = script.transpiled()[0].get_pserver_program("a:1")
    with pytest.raises(SavedError):
        io.load_persistables(script.executor(), tmp_path, main)
