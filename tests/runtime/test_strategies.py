"""Choices of a strategy: the lowering, the statistics, the fusion of all-reduces."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxfleet as jf
from jaxfleet.errors import FinalError, StrategyError
from jaxfleet.passes import ExchangeAllreduce, FuseAllreduce
from jaxfleet.passes.pipelines import collective_pipeline
from tests.runtime.comparing import assert_close, distributed, on_one_device, tolerance
from tests.runtime.toys import assert_alike, plain, rows
from tests.runtime.toys import distributed as toy
from tests.shared_zoo import arrays
from tests.zoo import ZOO

DEVICES = 4
STEPS = 5


def test_a_strategy_that_is_changed_says_how_another_is_made() -> None:
    strategy = jf.DistributedStrategy()
    with pytest.raises(FinalError, match=r"memory_budget is set to 0\.4") as refused:
        strategy.memory_budget = 0.4  # type: ignore[misc]  # the tested mistake
    assert "dataclasses.replace(strategy, memory_budget=0.4)" in refused.value.__notes__[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mlp", "dropout", "per_row_outputs", "feature_major"])
def test_pmap_is_another_spelling(name: str) -> None:
    wanted = on_one_device(name, STEPS)
    strategy = jf.DistributedStrategy(devices=DEVICES, lowering="pmap")
    for number, result in enumerate(distributed(name, STEPS, strategy)):
        assert_close(result, wanted[number], tolerance(ZOO[name]), f"after step {number}")


def test_pmap_takes_the_memory_of_the_state() -> None:
    step, state = toy(jf.DistributedStrategy(devices=DEVICES, lowering="pmap"))
    state, _ = step(state, rows(8))
    size_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert step.memory_analysis().alias_size_in_bytes >= size_bytes
    step(state, rows(8))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("strategy", ["single", "collective", None])
def test_a_strategy_may_be_a_name_or_nothing(strategy: Any) -> None:
    step, state = toy(strategy or "collective")
    assert len(step.devices) == (1 if strategy == "single" else jax.device_count())
    assert_alike(step(state, rows(8)), plain(1, rows(8)))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [
        {"fuse_allreduce_bytes": 1 << 20},
        {"passes": "fuse_allreduce{flat=true}"},
        {"passes": "fuse_allreduce{flat=false}"},
        {"allreduce": "exchange"},
        {"allreduce": "exchange", "fuse_allreduce_bytes": 1 << 20},
    ],
    ids=["by bytes", "flat", "as a tuple", "exchanged", "exchanged by bytes"],
)
def test_joined_all_reduces_give_the_same(options: Any) -> None:
    name = "clipping"
    wanted = on_one_device(name, STEPS)
    strategy = jf.DistributedStrategy(devices=DEVICES, **options)
    for number, result in enumerate(distributed(name, STEPS, strategy)):
        assert_close(result, wanted[number], tolerance(ZOO[name]), f"after step {number}")


def test_joined_all_reduces_are_fewer() -> None:
    def count(step: jf.Step) -> int:
        ops = step.program.root.ops
        return sum(op.type == "c_allreduce_sum" and bool(op.role_var) for op in ops)

    apart, _ = toy(jf.DistributedStrategy(devices=DEVICES))
    joined, _ = toy(jf.DistributedStrategy(devices=DEVICES, fuse_allreduce_bytes=1 << 20))
    assert (count(apart), count(joined)) == (2, 1)


def test_over_processes_on_cpus_small_ones_go_together_and_few_devices_exchange() -> None:
    def passes(devices: int, *, over_gloo: bool = True, **options: Any) -> list[Any]:
        made = collective_pipeline(
            jf.DistributedStrategy(**options), devices=devices, over_gloo=over_gloo
        )
        return [each for each in made if isinstance(each, FuseAllreduce | ExchangeAllreduce)]

    together = FuseAllreduce(across_roles=True, largest_bytes=1 << 16)
    assert passes(2) == [together, ExchangeAllreduce(devices=2)]
    assert passes(4) == [together, ExchangeAllreduce(devices=4)]
    assert passes(3) == passes(8) == passes(2, allreduce="ring") == [together]
    assert passes(8, allreduce="exchange") == [together, ExchangeAllreduce(devices=8)]
    assert passes(2, fuse_allreduce_bytes=9)[0] == FuseAllreduce(bucket_size_bytes=9)
    assert passes(2, over_gloo=False) == []


class Normed(nn.Module):
    """A net whose batch normalisation makes a row's output depend on the others."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(8)(x))
        return nn.Dense(1)(nn.relu(x))[:, 0]


def normed_step(tx: optax.GradientTransformation, mean: Any) -> Any:
    """Returns a training step; `mean` completes a mean over the batch."""
    model = Normed()

    def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss(params: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, "batch_stats": state["stats"]}
            found, new = model.apply(variables, batch["x"], mutable=["batch_stats"])
            return jnp.square(found - batch["y"]).mean(), new["batch_stats"]

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        value, stats, grads = mean((value, stats, grads))
        updates, opt = tx.update(grads, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "stats": stats}, {"loss": value}

    return train_step


def normed_state(tx: optax.GradientTransformation) -> Any:
    """Returns its state."""
    variables = Normed().init(jax.random.key(0), rows(4)["x"])
    params = variables["params"]
    return {"params": params, "opt": tx.init(params), "stats": variables["batch_stats"]}


@pytest.mark.grid
def test_local_statistics_are_those_of_a_step_written_by_hand() -> None:
    tx = optax.sgd(0.1)
    by_hand = jax.jit(
        jax.shard_map(
            normed_step(tx, lambda tree: jax.lax.pmean(tree, "devices")),
            mesh=Mesh(np.array(jax.devices()[:DEVICES]), ("devices",)),
            in_specs=(PartitionSpec(), PartitionSpec("devices")),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
    wrapped = jf.distributed_optimizer(tx)
    strategy = jf.DistributedStrategy(devices=DEVICES, local_statistics=True)
    plain_step = normed_step(wrapped, lambda tree: tree)
    step = jf.distribute(plain_step, (normed_state(wrapped), rows(16)), strategy)
    found, wanted = normed_state(wrapped), normed_state(tx)
    for number in range(STEPS):
        found, loss = step(found, rows(16, number))
        wanted, hand_loss = jax.block_until_ready(by_hand(wanted, rows(16, number)))
        assert_alike(found, wanted)
        assert_alike(loss, hand_loss)
    assert "stay on each device" in step.explain()


def test_the_statistics_are_the_whole_batchs_otherwise() -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))
    train_step = normed_step(tx, lambda tree: tree)
    found, wanted = normed_state(tx), normed_state(tx)
    step = jf.distribute(train_step, (found, rows(16)), jf.DistributedStrategy(devices=DEVICES))
    for number in range(STEPS):
        found, _ = step(found, rows(16, number))
        wanted, _ = jax.jit(train_step)(wanted, rows(16, number))
    assert_close(found, arrays(wanted), 3e-6, "at the end")


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("staleness", "4", "an integer"),
        ("staleness", -2, "0 or more"),
        ("k_steps", 2.5, "an integer"),
        ("merge", True, "an integer"),
        ("delay_compensation", "x", "a number"),
        ("delay_compensation", float("nan"), "0 or more"),
        ("step_timeout_s", None, "a number"),
    ],
)
def test_a_number_that_is_none_is_refused_where_it_is_said(
    name: str, value: Any, wanted: str
) -> None:
    """In every mode, so that the error does not appear when another field changes later."""
    with pytest.raises(StrategyError, match=f"strategy: {name} is .*, but must be {wanted}"):
        jf.DistributedStrategy(**{name: value})


def test_numbers_of_numpy_are_numbers() -> None:
    strategy = jf.DistributedStrategy(k_steps=np.int64(3), lost_after_s=np.float32(5))  # type: ignore[arg-type]
    assert strategy.k_steps == 3
