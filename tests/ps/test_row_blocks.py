"""Sparse updates on servers equal dense ones with zeros, bit for bit."""

import functools
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid.framework.to_ir import ir_program
from jaxfleet.fluid.pserver.normalization import normalize_server
from jaxfleet.lower import ExecutableCache
from jaxfleet.ps.gradient_encoding import RowGradient
from jaxfleet.ps.server.block_executor import BlockExecutor
from jaxfleet.ps.server.execution_plan import BlockPlan
from jaxfleet.ps.server.program_loader import read_plan
from tests.fluid.nets import fresh
from tests.fluid.pserver import test_sparse

ROWS, DIM = test_sparse.ROWS, test_sparse.DIM
CACHE = ExecutableCache()
SERVER = "127.0.0.1:7701"


def machine_of(make: Callable[[], Any], *, sync: bool = True) -> tuple[BlockExecutor, BlockPlan]:
    """Returns the executor of a job's one server, with some state, and the table's block."""
    config = fluid.DistributeTranspilerConfig()
    config.wait_port, config.sync_mode = False, sync
    transpiler = fluid.DistributeTranspiler(config)
    with fresh():
        test_sparse.net(make)
        transpiler.transpile(0, pservers=SERVER, trainers=2, sync_mode=sync)
    program = ir_program(transpiler.get_pserver_program(SERVER))
    executor = BlockExecutor(plan := read_plan(normalize_server(program), CACHE))
    random = np.random.default_rng(2)
    executor.assign({
        name: random.random(kind.shape, np.float32) for name, kind in plan.types.items()
        if name in plan.state
    })  # fmt: skip
    (block,) = [one for one in plan.blocks if "emb" in one.lowered.writes]
    return executor, block


def pushes(block: BlockPlan, steps: int = 3) -> Iterator[dict[str, RowGradient]]:
    """Yields trainers' gradients of some steps; some rows come from several of them."""
    random = np.random.default_rng(4)
    (merge,) = block.merges
    for step in range(steps):
        sent = {}
        for summand in merge.summands:
            numbers = random.choice(ROWS, 0 if step == 1 else 40, replace=False).astype(np.int32)
            rows = random.normal(size=(len(numbers), DIM)).astype(np.float32)
            sent[summand] = RowGradient(numbers, rows, ROWS)
        yield sent


def state_of(executor: BlockExecutor) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in executor.state.items()}


@pytest.mark.few(3)
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam"])
def test_rows_alone_are_updated_to_the_bit_as_in_whole_gradients(name: str, *, sync: bool) -> None:
    more = {"lazy_mode": True} if name == "Adam" else {}
    make = functools.partial(getattr(fluid.optimizer, name), 0.05, **more)
    made = [machine_of(make, sync=sync) for _ in range(2)]
    (by_rows, block), (whole, same) = made
    assert block.rows is not None
    for sent in pushes(block):
        by_rows.run(block, sent)
        whole.run(same, {summand: rows.whole() for summand, rows in sent.items()})
    assert (whole.counts.rows, by_rows.counts.rows > 0) == (0, True)
    found = state_of(by_rows)
    for variable, value in state_of(whole).items():
        np.testing.assert_array_equal(found[variable], value, err_msg=variable)


def test_what_a_step_takes_goes_by_the_rows_that_came() -> None:
    executor, block = machine_of(lambda: fluid.optimizer.SGD(0.05))
    sent = next(pushes(block))
    executor.run(block, sent)  # compiles
    before = executor.counts.rows
    at = {name: value.unsafe_buffer_pointer() for name, value in executor.state.items()}
    tracemalloc.start()
    executor.run(block, sent)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert executor.counts.rows - before == 128  # about 80 rows, and padding
    assert most < ROWS * DIM * 4 / 2  # less than half a gradient of zeros, of one trainer
    assert executor.state["emb"].unsafe_buffer_pointer() == at["emb"]  # the table is not copied


def test_rows_that_come_with_a_whole_gradient_are_made_whole() -> None:
    executor, block = machine_of(lambda: fluid.optimizer.SGD(0.05))
    first, second = next(pushes(block)).items()
    executor.run(block, {first[0]: first[1].whole(), second[0]: second[1]})
    assert executor.counts.rows == 0


@pytest.mark.parametrize("name", ["Adam", "Momentum", "Ftrl", "RMSProp", "DecayedAdagrad"])
def test_optimizers_that_move_rows_without_a_gradient_see_all_rows(name: str) -> None:
    more = {"momentum": 0.9} if name == "Momentum" else {}
    _, block = machine_of(lambda: getattr(fluid.optimizer, name)(0.05, **more))
    assert block.rows is None


def test_a_decay_of_all_rows_sees_all_rows() -> None:
    decay = fluid.regularizer.L1Decay(0.1)
    _, block = machine_of(lambda: fluid.optimizer.SGD(0.05, regularization=decay))
    assert block.rows is None
