"""Deleted rows, statistics and exports of a table: in every mode, under the same names."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfleet as jf
from jaxfleet.errors import CheckpointError, ProgramError
from tests.sparse.models import DIM, RATE, batch_of, sparse_job

TOLERANCE = 2e-6  # as in test_servers.py


def script_of(folder: Path, job: Any) -> Any:
    """Returns a script that trains, shrinks and exports in the mode of its step."""

    def script(step: Any) -> Any:
        state, gone = jax.tree.map(jnp.copy, job.state), []
        for seed in range(5):
            state, _ = step(state, batch_of(seed, values=1000))
            gone += [step.shrink("users"), step.shrink("users")]
        kept = step.export("users", folder / "arrays")
        assert step.export("users", folder / "lines", text=True) == kept
        with pytest.raises(CheckpointError, match=r"there already|could not export"):
            step.export("users", folder / "arrays")
        with pytest.raises(ProgramError, match="no table 'cars'"):
            step.shrink("cars")
        stats = step.stats()["tables"]["users"]
        return state, (gone, kept, stats["rows"], stats["evicted"])

    return script


@pytest.mark.few(1)
@pytest.mark.parametrize("communication", ["sync", "async"])
def test_a_script_does_the_same_in_one_process_and_over_servers(
    communication: str, tmp_path: Path
) -> None:
    job = sparse_job(jf.tables.Sgd(RATE), evictions=(jf.tables.Unseen(2),))
    example = (job.state, batch_of(0))
    alone = jf.distribute(job.train_step, example, "single")
    _, wanted = script_of(tmp_path / "alone", job)(alone)
    strategy = jf.DistributedStrategy(communication=communication)  # type: ignore[arg-type]
    twin = jf.Twin(job.train_step, example, strategy, servers=3)
    result = twin.play(script_of(tmp_path / "twin", job))
    if communication == "async":  # a trainer alone has half a batch, and counts steps by pushes
        assert result.metrics[0] == result.metrics[1]
        assert result.metrics[0][1] == result.metrics[0][2]
        return
    assert result.metrics == (wanted, wanted)
    assert sum(wanted[0]) > 20
    for name in ("keys.npy", "rows.npy"):
        mine, other = (np.load(tmp_path / who / "arrays" / name) for who in ("alone", "twin"))
        np.testing.assert_allclose(other, mine, rtol=TOLERANCE, atol=TOLERANCE)
    rows = np.load(tmp_path / "twin" / "arrays" / "rows.npy")
    assert rows.shape == (wanted[1], DIM)
    lines = (tmp_path / "twin" / "lines" / "00000.tsv").read_text().splitlines()
    found = {int(line.split("\t")[0]): line.split("\t")[1].split(" ") for line in lines}
    keys = np.load(tmp_path / "twin" / "arrays" / "keys.npy")
    np.testing.assert_array_equal(rows, [np.array(found[key], np.float32) for key in keys])
