"""Primitives that jax does not export, and those of libraries."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jaxfleet as jf
from jaxfleet.errors import CaptureError, ProgramError
from jaxfleet.ir import Program, load_program, parse, save_program
from tests.capture.common import assert_same_as_the_step

DEVICES = 4
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
WEIGHT = jnp.float32(1.5)
FUNCTIONS = [jnp.sin, jnp.cos]


def made(name: str, *, expands: bool) -> Any:
    """Returns a primitive that doubles, expanded to other primitives or only lowered to them."""
    primitive = Primitive(name)

    @primitive.def_abstract_eval
    def _(x: Any) -> Any:
        return jax.core.ShapedArray(x.shape, x.dtype)

    if expands:
        primitive.def_impl(lambda x: x * 2)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x: x * 2, multiple_results=False))
    return primitive


CHOICE = Primitive("choice")
CHOICE.def_impl(lambda index, x: FUNCTIONS[index.item()](x))
CHOICE.def_abstract_eval(lambda _, x: jax.core.ShapedArray(x.shape, x.dtype))
mlir.register_lowering(CHOICE, mlir.lower_fun(lambda _, x: jnp.cos(x), multiple_results=False))
EXPANDED = made("twice_written", expands=True)
LOWERED = made("twice_lowered", expands=False)
SIN = made("sin", expands=True)  # a library may reuse the name of one of jax's primitives


def doubled(x: Any) -> Any:
    def kernel(given: Any, found: Any) -> None:
        found[...] = given[...] * 2.0

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=out, interpret=True)(x)


def stepping(function: Any) -> Any:
    def step(state: Any, batch: Any) -> Any:
        return state, {"out": function(batch * state), "sum": function(batch).sum()}

    return step


def types(program: Program) -> set[str]:
    return {op.type for block in program.blocks for op in block.ops}


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (EXPANDED.bind, "jax.mul"),
        (SIN.bind, "jax.mul"),
        (lambda x: CHOICE.bind(np.int32(1), x), "jax.cos"),
        (
            lambda x: jax.random.bits(jax.random.clone(jax.random.key(0)), x.shape),
            "jax.random_bits",
        ),
    ],
    ids=["its implementation", "a name of jax's", "an index of functions", "random_clone"],
)
def test_a_primitive_that_is_made_of_others_is_read_as_those(function: Any, operator: str) -> None:
    captured = assert_same_as_the_step(stepping(function), WEIGHT, X)
    assert operator in types(captured.program)
    assert "exported" not in types(captured.program)
    assert captured.rows is None


@pytest.mark.parametrize("function", [LOWERED.bind, doubled])
def test_a_primitive_that_is_only_lowered_is_exported(function: Any) -> None:
    captured = assert_same_as_the_step(stepping(function), WEIGHT, X)
    assert "exported" in types(captured.program)
    assert parse(str(captured.program)) == captured.program


def test_an_exported_primitive_takes_any_number_of_rows() -> None:
    captured = jf.capture(stepping(LOWERED.bind), example=(WEIGHT, X))
    assert captured.rows is None
    (op, _) = [op for op in captured.program.root.ops if op.type == "exported"]
    assert op.attrs["inputs"] == op.attrs["outputs"] == ("f32[b,4]",)


def test_an_exported_primitive_runs_on_all_rows_of_the_devices_and_says_so() -> None:
    step = stepping(lambda x: jnp.tanh(LOWERED.bind(x)))
    strategy = jf.DistributedStrategy(devices=DEVICES, donate=False)
    found = jf.distribute(step, (WEIGHT, X), strategy)
    _, metrics = found(WEIGHT, X)
    np.testing.assert_allclose(metrics["out"], np.tanh(X * 3), rtol=1e-6)
    assert "no rule keeps the rows of 'twice_lowered' apart" in found.explain()


@pytest.mark.grid
@pytest.mark.processes
def test_an_exported_primitive_runs_in_a_process_without_its_library(tmp_path: Path) -> None:
    captured = jf.capture(stepping(LOWERED.bind), example=(WEIGHT, X))
    save_program(captured.program, tmp_path / "step.txt")
    assert load_program(tmp_path / "step.txt") == captured.program
    script = f"""
import numpy as np
from jaxfleet.ir import load_program
from jaxfleet.ops import Interpreter
program = load_program({str(tmp_path / "step.txt")!r})
values = dict(state=np.float32(1.5), batch=np.ones((6, 4), np.float32))
print(Interpreter(program, dict(b=6)).run(values)["metrics/sum"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "48.0"


def test_a_primitive_that_can_neither_be_read_nor_exported_is_named() -> None:
    primitive = Primitive("bare")
    primitive.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
    with pytest.raises(CaptureError, match="the primitive 'bare' cannot be written down or export"):
        jf.capture(stepping(primitive.bind), example=(WEIGHT, X))


def test_a_pallas_kernel_of_a_trained_step_runs_on_devices() -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))

    def step(w: Any, x: Any) -> Any:
        grads = jax.grad(lambda w: jnp.square(doubled(jax.lax.stop_gradient(x)) @ w).mean())(w)
        updates, _ = tx.update(grads, tx.init(w), w)
        return optax.apply_updates(w, updates), {}

    w = jnp.ones((4, 2))
    strategy = jf.DistributedStrategy(devices=DEVICES, donate=False)
    with pytest.warns(UserWarning, match="no rule keeps the rows of 'pallas_call' apart"):
        distributed = jf.distribute(step, (w, X), strategy)
    found, _ = distributed(w, X)
    np.testing.assert_allclose(found, step(w, X)[0], rtol=1e-5)


def test_equinoxs_checks_raise_from_every_device_with_their_message() -> None:
    eqx = pytest.importorskip("equinox")
    step = stepping(lambda x: eqx.error_if(x, jnp.any(x > 100), "x is too large"))
    found = jf.distribute(step, (WEIGHT, X), jf.DistributedStrategy(devices=DEVICES, donate=False))
    assert "raise_if" in types(found.captured.program)
    assert parse(str(found.captured.program)) == found.captured.program
    _, metrics = found(WEIGHT, X)
    np.testing.assert_allclose(metrics["out"], X * 1.5, rtol=1e-6)
    with pytest.raises(ProgramError, match=r"^x is too large"):
        found(WEIGHT, X + 1000)


def test_equinoxs_functions_that_are_not_inlined_are_divided() -> None:
    internal = pytest.importorskip("equinox.internal")
    step = stepping(internal.noinline(jnp.tanh))
    found = jf.distribute(step, (WEIGHT, X), jf.DistributedStrategy(devices=DEVICES, donate=False))
    assert "jax.tanh" in types(found.captured.program)
    assert "gathers" not in found.explain()


@pytest.mark.grid
def test_a_differential_equation_of_diffrax_is_solved_on_devices() -> None:
    diffrax = pytest.importorskip("diffrax")

    def solved(x: Any) -> Any:
        def one(y: Any) -> Any:
            term = diffrax.ODETerm(lambda t, y, _: -y * t)
            found = diffrax.diffeqsolve(term, diffrax.Euler(), t0=0, t1=1, dt0=0.25, y0=y)
            return found.ys[-1]

        return jax.vmap(one)(x)

    step = stepping(solved)
    found = jf.distribute(step, (WEIGHT, X), jf.DistributedStrategy(devices=DEVICES, donate=False))
    _, metrics = found(WEIGHT, X)
    np.testing.assert_allclose(metrics["out"], step(WEIGHT, X)[1]["out"], rtol=1e-5)
