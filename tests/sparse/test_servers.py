"""Tables on servers: the rows are to the bit the same on any number, and those of a dense table."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfleet as jf
from jaxfleet.lower import ExecutableCache
from tests.sparse.models import OPTIMIZERS, VALUES, batch_of, run_dense, sparse_job

# As in test_one_process.py: two trainers' sums are sums of sums.
TOLERANCE = 2e-6


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_are_to_the_bit_the_same_on_any_number_of_servers(optimizer: str) -> None:
    mine, dense = OPTIMIZERS[optimizer]
    job, cache = sparse_job(mine), ExecutableCache()
    batches = [batch_of(seed) for seed in range(8)]

    def script(step: Any) -> Any:
        state, losses = jax.tree.map(jnp.copy, job.state), []
        for batch in batches:
            state, loss = step(state, batch)
            losses.append(float(loss))
        return step.pull(state), (losses, step.tables.look_up("users", np.arange(VALUES)).copy())

    found = []
    for servers in (1, 2, 3):
        example, strategy = (job.state, batches[0]), jf.DistributedStrategy(min_block_size=2)
        twin = jf.Twin(job.train_step, example, strategy, servers=servers, cache=cache)
        result = twin.play(script)
        rows = [metrics[1].tobytes() for metrics in result.metrics]
        assert rows[0] == rows[1]
        found.append((rows[0], result.states[0]["params"]["w"].tobytes(), result.metrics[0][0]))
    assert found[0] == found[1] == found[2]
    wanted, losses = run_dense(job.table, dense, batches)
    np.testing.assert_allclose(found[0][2], losses, rtol=TOLERANCE)
    trained = np.frombuffer(found[0][0], np.float32).reshape(wanted["users"].shape)
    np.testing.assert_allclose(trained, wanted["users"], rtol=TOLERANCE, atol=TOLERANCE)


def test_a_trainers_program_has_nothing_as_long_as_the_table() -> None:
    job = sparse_job(jf.tables.Sgd())
    twin = jf.Twin(job.train_step, (job.state, batch_of(0, values=2**62)), servers=2)
    program = twin.programs().trainer
    known = [v.shape for block in program.blocks for v in block.variables.values()]
    known += [v.shape for v in program.variables.values()]
    assert max(size for shape in known for size in shape if isinstance(size, int)) <= 8
    assert "send_rows(X=users@GRAD)" in str(program)
    assert all("users" in str(server.attrs["tables"]) for server in twin.programs().servers)
