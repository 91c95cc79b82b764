"""A step can be lowered for other platforms: nothing in it is specific to the CPU."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax import export

import jaxfleet as jf
from tests.shared_zoo import captured_zoo

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DEVICES = 4
ENTRIES = (
    "cnn_batchnorm",
    "remat",
    "multisteps",
    "dropout",
    "row_keys",
    "rbg",
    "mixed_precision",
    "sorted_batch",
    "per_row_outputs",
    "while_loop",
    "lstm",
)


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digits() -> jf.Step:
    module = example("digits")
    model, batch = module.CNN(), {"x": np.zeros((96, 8, 8, 1), np.float32), "y": np.zeros(96, int)}
    variables = model.init(jax.random.key(0), batch["x"][:1], train=True)
    tx = jf.distributed_optimizer(optax.adam(1e-3))
    state = module.TrainState.create(apply_fn=model.apply, tx=tx, **variables)
    return distributed(module.train_step, state, batch)


def transformer() -> jf.Step:
    module = example("transformer")
    model, batch = module.Transformer(90), np.zeros((64, module.LENGTH + 1), np.int32)
    variables = model.init(jax.random.key(0), batch[:1, :-1])
    tx = jf.distributed_optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
    state = module.TrainState.create(apply_fn=model.apply, tx=tx, **variables)
    return distributed(module.train_step, state, batch)


def from_zoo(name: str) -> jf.Step:
    return jf.Step(
        captured_zoo(name), jf.DistributedStrategy(devices=DEVICES), jax.devices()[:DEVICES]
    )


def distributed(train_step: Any, state: Any, batch: Any) -> jf.Step:
    step = jf.distribute(train_step, (state, batch), jf.DistributedStrategy(devices=DEVICES))
    assert isinstance(step, jf.Step)
    return step


def assert_exports(step: jf.Step, platform: str) -> None:
    """Fails unless the step can be lowered for a platform, on as many devices."""
    state, batch = step.example_types()
    exported = export.export(step.compiled, platforms=[platform])(state, batch)
    assert exported.platforms == (platform,)
    assert exported.nr_devices == DEVICES
    assert "all_reduce" in exported.mlir_module()


@pytest.mark.grid
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("make", [digits, transformer])
def test_the_steps_of_the_examples_can_be_exported(make: Any, platform: str) -> None:
    assert_exports(make(), platform)


@pytest.mark.few(2)
@pytest.mark.parametrize("platform", [pytest.param("cuda", marks=pytest.mark.grid), "tpu"])
@pytest.mark.parametrize("name", ENTRIES)
def test_steps_of_every_kind_can_be_exported(name: str, platform: str) -> None:
    assert_exports(from_zoo(name), platform)
