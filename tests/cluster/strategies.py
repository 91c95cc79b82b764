"""The ranks' job of `test_strategies.py`: a training run for each strategy.

`python strategies.py FOLDER` writes, for each, the mean over all devices after the last step, with
a save and a restore on the way.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import StrategyError
from tests.collective.models import STEPS, batch, distributed

STRATEGIES: dict[str, dict[str, Any]] = {
    "sharded": {"sharded": True, "merge": 2},
    "hierarchical": {"hierarchical": 2},
    "apart": {
        "communication": "local_sgd",
        "k_steps": 4,
        "outer": optax.sgd(0.7, momentum=0.9, nesterov=True),
        "adaptive": "loss",
        "amp": "float16",
    },
    "amp": {"amp": "float16", "loss_scale": 2.0**24},
}


def trained(name: str, folder: Path | None = None) -> tuple[list[np.ndarray], float]:
    """Returns the leaves after the last step, and this process's share of the optimizer's bytes."""
    step, state = distributed("clipped", jf.DistributedStrategy(**STRATEGIES[name]))
    for number in range(STEPS):
        if (
            number == STEPS // 2 - 1 and folder is not None
        ):  # between two exchanges, and two updates
            step.save(folder / f"{name} saved", state)
            state = step.restore(folder / f"{name} saved")
        state, _ = step(state, batch(number))
    if jax.process_index() == 0:
        _ask_alone(step, name)
    opt = [leaf for leaf in jax.tree.leaves(state.opt) if isinstance(leaf, jax.Array)]
    parts = {(n, str(x.index)): x.data.nbytes for n, leaf in enumerate(opt)
             for x in leaf.addressable_shards}  # fmt: skip
    pulled = step.pull(state)
    whole = pulled.params if name == "sharded" else pulled
    return [np.asarray(x) for x in jax.tree.leaves(whole)], sum(parts.values())


def _ask_alone(step: Any, name: str) -> None:
    """Fails unless a single rank can query its held state without waiting for the others."""
    held = step.stats()["held"]
    assert ("amp.scale" in held) == ("amp" in STRATEGIES[name]), held


def _cannot_have_more_devices() -> None:
    """Fails unless a rank that requests the devices of all ranks gets a hint how to have them."""
    with pytest.raises(StrategyError) as refused:
        jf.emulate_devices(jax.device_count())
    assert f"--devices-per-process {jax.device_count()}" in refused.value.__notes__[-1]


def main(folder: Path) -> None:
    jf.initialize()
    _cannot_have_more_devices()
    for name in STRATEGIES:
        leaves, own = trained(name, folder)
        np.savez(folder / f"{name}-{jax.process_index()}.npz", *leaves, own=own)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
