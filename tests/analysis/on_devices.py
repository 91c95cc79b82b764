"""Runs small functions on one device and, rewritten, on several, and compares the results.

One step contains many functions, so that a whole family costs one compilation.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfleet.capture.signature import Signature
from jaxfleet.capture.trace import Traced, trace
from jaxfleet.ir import Program, verify
from jaxfleet.lower import Interface, lower_step
from jaxfleet.passes import GradAllreduce

ROWS = 8

Function = Callable[[Any, Any], Any]
Family = Mapping[str, Function]


class Batch(NamedTuple):
    """Rows of every kind that a test needs."""

    x: Any  # f32[b,6]
    y: Any  # f32[b,6]
    t: Any  # f32[b,4,6]
    image: Any  # f32[b,6,6,2]
    k: Any  # i32[b], from 0 to 5
    ids: Any  # i32[b,3], from 0 to 6
    m: Any  # bool[b]
    o: Any  # f32[b], each a small whole number, so that sums are exact in any order


class State(NamedTuple):
    """Values that every device has."""

    w: Any  # f32[6,5]
    v: Any  # f32[6]
    table: Any  # f32[7,6]
    kernel: Any  # f32[3,3,2,4]
    s: Any  # f32[]
    n: Any  # i32[]
    keys: Any  # key<fry>[]


def make_batch(rows: int = ROWS) -> Batch:
    rng = np.random.default_rng(0)
    f32 = np.float32
    return Batch(
        x=rng.normal(size=(rows, 6)).astype(f32),
        y=rng.normal(size=(rows, 6)).astype(f32),
        t=rng.normal(size=(rows, 4, 6)).astype(f32),
        image=rng.normal(size=(rows, 6, 6, 2)).astype(f32),
        k=rng.integers(0, 6, size=rows).astype(np.int32),
        ids=rng.integers(0, 7, size=(rows, 3)).astype(np.int32),
        m=np.arange(rows) % 3 != 1,
        o=rng.integers(-4, 5, size=rows).astype(f32),
    )


def make_state() -> State:
    rng = np.random.default_rng(1)
    f32 = np.float32
    return State(
        w=rng.normal(size=(6, 5)).astype(f32),
        v=rng.normal(size=6).astype(f32),
        table=rng.normal(size=(7, 6)).astype(f32),
        kernel=rng.normal(size=(3, 3, 2, 4)).astype(f32),
        s=np.float32(1.5),
        n=np.int32(3),
        keys=jax.random.key(7),
    )


def rewritten(
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    batch: Any,
    *,
    devices: int,
    letter: bool,
    **options: Any,
) -> tuple[Program, Any]:
    """Returns a step's program for several devices, and the step that runs it."""
    signature = Signature.of(state, batch)
    rows = None if letter else signature.rows
    traced = trace(step, signature, rows=rows, name="tiny")
    program = GradAllreduce(devices=devices, **options).run(traced.program)
    verify(program)
    lowered = lower_step(
        program,
        _interface(signature, traced),
        devices=jax.devices()[:devices],
        lowering="shard_map",
        donate=False,
    )
    return program, lowered.function


def every_way(*ways: tuple[int, bool]) -> list[Any]:
    """Returns parameters `devices` and `letter`: the first by default, the others in the grid."""
    first, *others = ways
    return [first, *(pytest.param(*way, marks=pytest.mark.grid) for way in others)]


def check(family: Family, *, devices: int, letter: bool = True) -> Program:
    """Compares every function of a family with itself on several devices.

    Args:
        family: functions of a `State` and a `Batch`, by name.
        devices: the number of devices.
        letter: whether the batch size is a letter in the program, or a number.

    Returns:
        The rewritten program.
    """

    def step(state: State, batch: Batch) -> tuple[State, Any]:
        return state, {name: function(state, batch) for name, function in family.items()}

    return check_step(step, make_state(), make_batch(), devices=devices, letter=letter)


def check_step(
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    batch: Any,
    *,
    devices: int,
    letter: bool = True,
    steps: int = 1,
) -> Program:
    """Compares the state and the metrics of a step with themselves on several devices."""
    program, function = rewritten(step, state, batch, devices=devices, letter=letter)
    expected, wanted = jax.jit(step), (state, None)
    found = (state, None)
    for _ in range(steps):
        wanted = expected(wanted[0], batch)
        found = jax.block_until_ready(function(found[0], batch))
        assert_same(wanted, found)
    return program


def assert_same(wanted: Any, found: Any) -> None:
    """Compares two trees: floats up to the order of their sums, everything else exactly."""
    tree: Any = jax.tree.structure(wanted)
    assert tree == jax.tree.structure(found)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(wanted)]
    for path, x, y in zip(paths, jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        _assert_same_leaf(path, x, y)


def _assert_same_leaf(path: str, wanted: Any, found: Any) -> None:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), path
    if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
        wanted, found = jax.random.key_data(wanted), jax.random.key_data(found)
    if not jnp.issubdtype(wanted.dtype, jnp.inexact):
        np.testing.assert_array_equal(found, wanted, err_msg=path)
        return
    low = wanted.dtype.itemsize < np.dtype(np.float32).itemsize
    wide = np.complex64 if jnp.issubdtype(wanted.dtype, jnp.complexfloating) else np.float32
    np.testing.assert_allclose(
        np.asarray(found).astype(wide),
        np.asarray(wanted).astype(wide),
        rtol=3e-2 if low else 2e-5,
        atol=3e-2 if low else 2e-5,
        err_msg=path,
    )


def _interface(signature: Signature, traced: Traced) -> Interface:
    return Interface(
        tuple(leaf.name for leaf in signature.state),
        tuple(leaf.name for leaf in signature.batch),
        traced.metrics,
        signature.state_tree,
        signature.batch_tree,
        traced.metrics_tree,
    )
