"""One IR serves both front ends: programs of either are printed here, and run elsewhere."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxfleet as jf
from jaxfleet.ir import Program, parse, print_program, verify
from jaxfleet.ir.serialization import save_program
from tests.one_ir import model
from tests.one_ir.fluid_program import TEXT
from tests.one_ir.replay import run

TIMEOUT_S = 100


def fluid_example() -> tuple[Program, dict[str, Any]]:
    random = np.random.default_rng(0)
    x = random.normal(size=(8, 4)).astype(np.float32)
    values = {
        "x": x,
        "x_by_rows": np.ascontiguousarray(x.T),
        "y": random.normal(size=(8, 1)).astype(np.float32),
        "w": np.ones((4, 1), np.float32),
        "bias": np.zeros(1, np.float32),
        "lr": np.float32(0.5),
        "steps": np.int32(3),
    }
    return parse(TEXT), values


@functools.cache
def captured_example() -> tuple[Program, dict[str, Any]]:
    state, batch = model.example()
    captured = jf.capture(model.train_step, example=(state, batch))
    leaves = [*captured.signature.state, *captured.signature.batch]
    values = [*jax.tree.leaves(state), *jax.tree.leaves(batch)]
    named = zip(leaves, map(np.asarray, values), strict=True)
    return captured.program, {leaf.name: value for leaf, value in named}


def in_a_fresh_process(
    program: Program, values: dict[str, Any], folder: Path, *modules: str
) -> tuple[dict[str, Any], set[str]]:
    """Returns a program's results in a new process, and the modules imported there."""
    save_program(program, folder / "program.txt")
    np.savez(folder / "values.npz", **values)
    results = folder / "results.npz"
    command = [sys.executable, "-m", "tests.one_ir.replay", str(folder / "program.txt")]
    command += [str(folder / "values.npz"), str(results), *modules]
    root = Path(__file__).parents[2]
    done = subprocess.run(  # noqa: PLW1510  # its output is more useful than the exception
        command, cwd=root, timeout=TIMEOUT_S, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    with np.load(results) as archive:
        return dict(archive), set(Path(f"{results}.modules").read_text().split())


def assert_bitwise_equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        assert value.tobytes() == right[name].tobytes(), name


def op_types(program: Program) -> set[str]:
    return {op.type for block in program.blocks for op in block.ops}


@pytest.mark.processes
def test_a_program_of_fluids_operators_runs_in_a_fresh_process(tmp_path: Path) -> None:
    program, values = fluid_example()
    verify(program)
    assert parse(print_program(program)) == program
    there, _ = in_a_fresh_process(program, values, tmp_path)
    assert_bitwise_equal(run(program, values), there)


@pytest.mark.grid
@pytest.mark.processes
def test_a_captured_step_runs_in_a_process_that_never_saw_the_model(tmp_path: Path) -> None:
    program, values = captured_example()
    verify(program)
    assert parse(print_program(program)) == program
    assert {"jax.scan", "jax.remat2", "jax.cond"} <= op_types(program)
    there, modules = in_a_fresh_process(program, values, tmp_path)
    assert not modules & {"flax", model.__name__}
    assert_bitwise_equal(run(program, values), there)


@pytest.mark.grid
def test_the_captured_step_does_what_the_users_step_does() -> None:
    state, batch = model.example()
    program, values = captured_example()
    new_state, metrics = jax.jit(model.train_step)(state, batch)
    wanted = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((new_state, metrics))]
    captured = jf.capture(model.train_step, example=(state, batch))
    names = [*(leaf.name for leaf in captured.signature.state), *captured.metrics]
    after = run(program, values)
    assert [after[name].tobytes() for name in names] == wanted


def test_a_loop_changes_what_its_operator_writes_and_nothing_else() -> None:
    program, values = fluid_example()
    after = run(program, values)
    assert after["steps"] == 4
    assert after["lr"] == 0.25  # halved, since the fourth step is late
    assert 0 < after["best"] < 9
    assert not np.array_equal(after["w"], values["w"])
