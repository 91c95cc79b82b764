"""Inspection of a step."""

import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxfleet as jf
from jaxfleet.ir import parse, print_program
from tests.runtime.toys import assert_alike, distributed, plain, rows, start, training

ARRAYS = 7  # w, b, their two moments each, and Adam's count


def compilations(caplog: pytest.LogCaptureFixture) -> int:
    """Returns the number of compilations of the step in jax's log."""
    return sum(
        record.getMessage().startswith("Compiling jit(train_step)") for record in caplog.records
    )


def test_a_step_shows_its_name_its_mode_and_its_devices() -> None:
    step, _ = distributed()
    assert repr(step) == "Step('train_step', mode='collective', devices=4)"
    assert len(step.devices) == 4


def test_a_name_can_be_given() -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))
    step = jf.distribute(training(tx), (start(tx), rows(8)), "single", name="mine")
    assert isinstance(step, jf.Step)
    assert step.program.name == "mine"
    assert repr(step) == "Step('mine', mode='single', devices=1)"
    assert "jit_mine" in step.as_text()


def test_the_program_is_the_transpiled_one_and_round_trips() -> None:
    step, _ = distributed()
    assert step.program.attrs["devices"] == 4
    assert "c_allreduce_sum" in str(step.program)
    assert "c_allreduce_sum" not in str(step.captured.program)
    assert parse(print_program(step.program)) == step.program


def test_the_dumps_hold_what_every_pass_did() -> None:
    step, _ = distributed()
    names = ["dce", "turn_products", "grad_allreduce", "donate"]
    assert [stage.name for stage in step.dumps][-4:] == names
    assert (
        step.dumps["grad_allreduce"].before.op_count < step.dumps["grad_allreduce"].after.op_count
    )
    assert step.dumps[-1].after == step.program


def test_dumps_are_written_where_they_are_asked_for(tmp_path: Path) -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))
    jf.distribute(training(tx), (start(tx), rows(8)), dump_dir=tmp_path)
    assert any("grad_allreduce" in path.name for path in tmp_path.iterdir())


def test_the_explanation_is_some_twenty_lines() -> None:
    step, _ = distributed()
    lines = step.explain().splitlines()
    assert 5 < len(lines) < 25
    assert "'train_step'" in lines[0]
    assert any("4 cpu devices" in line for line in lines)


def test_the_analyses_are_xlas_of_one_device() -> None:
    four, _ = distributed()
    one, _ = distributed("single")
    assert four.cost_analysis()["flops"] < one.cost_analysis()["flops"]
    assert four.memory_analysis().argument_size_in_bytes > 0
    assert re.search(r"all-reduce(-start)?\(", four.as_text())
    assert "all-reduce" not in one.as_text()


@pytest.mark.parametrize("devices", [1, 4])
def test_the_whole_state_is_aliased(devices: int) -> None:
    step, state = distributed(devices=devices)
    size_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert step.memory_analysis().alias_size_in_bytes >= size_bytes
    assert step.as_text().count("may-alias") == ARRAYS


def test_lower_takes_other_types() -> None:
    step, _ = distributed()
    state, _ = step.example_types()
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows(64))
    assert "tensor<64x6xf32>" in step.lower(state, batch).as_text()
    assert "tensor<8x6xf32>" in step.lower().as_text()


def test_the_example_types_are_those_of_the_example() -> None:
    step, state = distributed()
    types, batch = step.example_types()
    paths = [path for path, _ in jax.tree.leaves_with_path(types)]
    assert paths == [path for path, _ in jax.tree.leaves_with_path(state)]
    assert batch["x"].shape == (8, 6)
    assert batch["y"].dtype == jnp.float32


@pytest.mark.parametrize("devices", [1, 4])
def test_a_step_and_its_analyses_share_one_compilation(
    devices: int, caplog: pytest.LogCaptureFixture
) -> None:
    step, state = distributed(devices=devices)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        step.memory_report()
        step.memory_analysis()
        for number in range(3):
            state, _ = step(state, rows(8, number))
        step.as_text()
    assert compilations(caplog) == 1


@pytest.mark.parametrize("devices", [1, 4])
def test_the_compiled_function_has_the_users_signature(devices: int) -> None:
    step, state = distributed(devices=devices)
    found = jax.block_until_ready(step.compiled(state, rows(8)))
    assert_alike(found, plain(1, rows(8)))
