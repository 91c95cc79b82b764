"""The distributed table: any int64 ids, rows created at first touch, only on servers."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import ProgramError
from jaxfleet.fluid import layers
from tests.fluid.pserver.jobs import Feed, Script, run_alone, run_job, shared_out
from tests.fluid.pserver.memory import Job

DIM, BATCH, RATE = 4, 6, 0.5


def net(
    rows: int = 100,
    *,
    distributed: bool = True,
    sparse: bool = True,
    begins: Any = None,
    rate: Any = RATE,
    own_rate: float = 1.0,
) -> fluid.Variable:
    """Returns the loss of a net with two lookups in one table."""
    begins = fluid.initializer.Constant(0.25) if begins is None else begins
    attr = fluid.ParamAttr("emb", initializer=begins, learning_rate=own_rate)
    found = []
    for name in ("ids0", "ids1"):
        ids = fluid.data(name, [None, 2], dtype="int64")
        looked_up = fluid.embedding(
            ids, [rows, DIM], sparse and distributed, distributed, param_attr=attr
        )
        found.append(layers.reshape(looked_up, [-1, 2 * DIM]))
    x, y = layers.concat(found, axis=1), fluid.data("y", [None, 1])
    loss = layers.mean(layers.square_error_cost(layers.fc(x, 1, param_attr="w"), y))
    fluid.optimizer.SGD(rate() if callable(rate) else rate).minimize(loss)
    return loss


def batches(steps: int = 5, *, ids: np.ndarray | None = None) -> list[Feed]:
    random = np.random.default_rng(5)
    known = np.arange(100) if ids is None else ids
    return [
        {
            "ids0": random.choice(known, (BATCH, 2)),
            "ids1": random.choice(known, (BATCH, 2)),
            "y": random.normal(size=(BATCH, 1)).astype(np.float32),
        }
        for _ in range(steps)
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_one_trainer_trains_as_a_dense_table_in_one_process(servers: int) -> None:
    fed = batches()
    job = run_job(net, [fed], servers=servers)
    alone = run_alone(partial(net, distributed=False), fed)
    np.testing.assert_allclose(job.losses, alone.losses, rtol=1e-4)


def test_distributed_alone_says_that_gradients_are_rows() -> None:
    fed = batches(2)
    as_sparse, alone = (run_job(partial(net, sparse=sparse), [fed]) for sparse in (True, False))
    np.testing.assert_array_equal(as_sparse.losses, alone.losses)


def test_a_table_of_many_rows_begins_on_servers_and_never_whole_in_one_process() -> None:
    main, startup = fluid.Program(), fluid.Program()
    with fluid.program_guard(main, startup):
        net(10**9)
    saved = startup.desc.serialize_to_string()
    for program in (startup, startup.clone(), fluid.Program.parse_from_string(saved)):
        with pytest.raises(ProgramError, match=r"'emb' is a distributed table.*14\.9 GiB") as found:
            fluid.Executor().run(program, scope=fluid.Scope())
    notes = "".join(found.value.__notes__)
    assert "DistributeTranspiler" in notes
    assert "DownpourSGD" in notes
    assert len(run_job(partial(net, 10**9), [batches(2)]).losses[0]) == 2
    assert len(run_alone(net, batches(2)).losses[0]) == 2  # few rows: an ordinary parameter


@pytest.mark.grid
def test_a_table_has_the_rate_that_its_parameter_says() -> None:
    fed = batches()
    job = run_job(partial(net, own_rate=0.25), [fed])
    alone = run_alone(partial(net, distributed=False, own_rate=0.25), fed)
    np.testing.assert_allclose(job.losses, alone.losses, rtol=1e-4)


@pytest.mark.parametrize("runtime_split", [False, True])
def test_a_trainer_that_is_not_waited_for_trains_as_one_process(*, runtime_split: bool) -> None:
    fed = batches()
    config = {"sync_mode": False, "runtime_split_send_recv": runtime_split}
    job, alone = run_job(net, [fed], config=config), run_alone(partial(net, distributed=False), fed)
    np.testing.assert_allclose(job.losses, alone.losses, rtol=1e-4)


def test_ids_of_two_trainers_are_added_up_and_not_averaged() -> None:
    """As in fluid, whose servers divide all other gradients by the number of trainers."""
    fed = batches()
    job = run_job(net, shared_out(fed, 2))
    # Twice the rate, for the table alone, turns the mean into a sum.
    alone = run_alone(partial(net, distributed=False, own_rate=2.0), fed)
    np.testing.assert_allclose(np.mean(job.losses, 0), alone.losses[0], rtol=1e-4)


def test_any_int64_is_an_id_and_ids_that_agree_in_32_bits_are_others() -> None:
    far = np.array([-1, 0, 1 << 32, (1 << 32) + 1, -(1 << 63), (1 << 63) - 1, 1, 7 << 40])
    ids, as_they_are = batches(4, ids=far), batches(4, ids=np.arange(8))
    found = run_job(partial(net, 1 << 40), [ids]).losses
    wanted = run_job(net, [as_they_are]).losses  # the same draws by position, with other names
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_rows_begin_by_their_ids_alone_however_many_servers_there_are() -> None:
    begins = fluid.initializer.Uniform(-1.0, 1.0)
    jobs = [run_job(partial(net, begins=begins), [batches(3)], servers=n) for n in (1, 3)]
    np.testing.assert_array_equal(jobs[0].losses, jobs[1].losses)
    assert np.std(jobs[0].losses) > 0


def test_what_servers_cannot_keep_row_by_row_is_refused_with_what_to_do() -> None:
    for more, match in (
        ({"begins": fluid.initializer.TruncatedNormal()}, "rows of 'emb' are begun by"),
        ({"rate": lambda: layers.exponential_decay(0.1, 10, 0.9)}, "is computed at every step"),
    ):
        script = Script(Job(), partial(net, **more), ["a:1"], 1)
        transpiler = script.transpiled()[0]
        for program in (transpiler.get_trainer_program(), transpiler.get_pserver_program("a:1")):
            with pytest.raises(ProgramError, match=match):
                script.executor().run(program, scope=fluid.Scope())
