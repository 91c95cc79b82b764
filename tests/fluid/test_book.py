"""The models of fluid's book train in one process, with servers, and on several devices."""

from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from tests.fluid.book import MODELS, Model
from tests.fluid.nets import fresh
from tests.fluid.parallel import devices
from tests.fluid.pserver.jobs import Seen, held, run_alone, run_job

TRAINERS, STEPS = 2, 3
_DEAR = ("image classification", "label semantic roles", "recommender system")  # 3 to 5 s of CPU
CLOSE: Any = {"rtol": 2e-5, "atol": 2e-6}  # sums over trainers have another order


def shares(model: Model) -> list[dict[str, Any]]:
    """Returns the feeds of each trainer or device: halves, or the whole each."""
    batch = model.batch()
    if not model.is_shared:
        return [batch] * TRAINERS
    return [{name: rows[n::TRAINERS] for name, rows in batch.items()} for n in range(TRAINERS)]


def on_server(table: str, job: Seen) -> np.ndarray:
    """Returns the rows of a table that trainers do not hold, from its server."""
    (scope,) = [scope for scope in job.scopes if table in scope]
    return np.asarray(scope[table])


@pytest.mark.grid
@pytest.mark.parametrize("name", _DEAR)
def test_a_model_learns_in_one_process(name: str) -> None:
    losses = run_alone(MODELS[name].build, [MODELS[name].batch()] * STEPS).losses[0]
    assert losses[-1] < losses[0]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.grid] * (name in _DEAR)) for name in MODELS]
)
def test_a_model_trains_over_servers_as_in_one_process(name: str) -> None:
    model = MODELS[name]
    alone = run_alone(model.build, [model.batch()] * STEPS)
    assert alone.losses[0][-1] < alone.losses[0][0], "it does not learn"
    job = run_job(model.build, [[share] * STEPS for share in shares(model)])
    np.testing.assert_allclose(np.mean(job.losses, axis=0), alone.losses[0], **CLOSE)
    for params in job.params:
        for param, value in alone.params[0].items():
            found = params[param] if params[param].size else on_server(param, job)
            np.testing.assert_allclose(found, value, err_msg=param, **CLOSE)


@pytest.mark.grid
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_on_two_devices_as_on_one(name: str) -> None:
    model = MODELS[name]
    alone = run_alone(model.build, [model.batch()] * STEPS)
    scope, exe = fluid.Scope(), fluid.Executor(fluid.CPUPlace())
    with fresh() as (main, startup):
        loss = model.build()
        main.random_seed = startup.random_seed = 7
    exe.run(startup, scope=scope)
    with devices(TRAINERS):
        ranks = fluid.ParallelExecutor(
            use_cuda=False, loss_name=loss.name, main_program=main, scope=scope
        )
    losses = [np.mean(ranks.run([loss.name], shares(model))[0]) for _ in range(STEPS)]
    np.testing.assert_allclose(losses, alone.losses[0], **CLOSE)
    found = held(main, scope)
    for param, value in alone.params[0].items():
        np.testing.assert_allclose(found[param], value, err_msg=param, **CLOSE)
