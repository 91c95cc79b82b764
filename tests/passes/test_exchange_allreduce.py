"""Sums over devices by exchanges in pairs."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxfleet.errors import PassError
from jaxfleet.ir import parse
from jaxfleet.ops.collective import _exchanged
from jaxfleet.passes import ExchangeAllreduce
from jaxfleet.testing import check_pass

HEAD = """
program p
  data  a: f32[4]
  data  b: bool[4]
  data  c: i32[4]
  block 0
    backward"""


@pytest.mark.parametrize(
    ("op", "becomes"),
    [
        ("c = c_allreduce_sum(c)", "c = c_allreduce_sum(c) {exchange=true}"),
        (
            "a = c_allreduce_sum(a) {flat=true, ring_id=1}",
            "a = c_allreduce_sum(a) {exchange=true, flat=true, ring_id=1}",
        ),
        ("b = c_allreduce_sum(b)", "b = c_allreduce_sum(b)"),
        ("a = c_allreduce_max(a)", "a = c_allreduce_max(a)"),
        ("a = c_allreduce_sum(a) {groups=2}", "a = c_allreduce_sum(a) {groups=2}"),
    ],
    ids=["integers", "a bucket", "truth values", "a maximum", "not over all devices"],
)
def test_what_is_exchanged_and_what_stays(op: str, becomes: str) -> None:
    check_pass(ExchangeAllreduce(), before=f"{HEAD}\n{op}", after=f"{HEAD}\n{becomes}")


@pytest.mark.parametrize("devices", [-4, 0, 1, 3, 6])
def test_devices_that_do_not_go_in_pairs_are_refused(devices: int) -> None:
    with pytest.raises(PassError, match=f"{devices} devices do not go in pairs"):
        ExchangeAllreduce(devices=devices)


def test_an_exchange_knows_where_it_comes_from() -> None:
    program = parse(f"{HEAD}\n a = c_allreduce_sum(a)  # train.py:7, in step")
    (op,) = ExchangeAllreduce().run(program).root.ops
    assert op.source.comment() == "train.py:7, in step; by exchange_allreduce"


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_all_devices_get_the_same_to_the_bit(devices: int) -> None:
    """Even if a summand is a product, which may be rounded with the sum or before it."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    rows = PartitionSpec("data")

    def sums(x: jax.Array, y: jax.Array) -> jax.Array:
        return _exchanged(x * y, "data") * 0.3

    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(devices, 4096)).astype(np.float32) for _ in range(2))
    made = jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=rows, out_specs=rows))(x, y)
    found = np.asarray(made)
    assert all(np.array_equal(found[0], other) for other in found)
    np.testing.assert_allclose(found[0], (x * y).sum(0) * np.float32(0.3), rtol=1e-5, atol=1e-5)


def test_two_devices_get_what_a_ring_gives_to_the_bit() -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    rows, whole = PartitionSpec("data"), PartitionSpec()
    x = np.random.default_rng(1).normal(size=(2, 4096)).astype(np.float32)
    found = []
    for add in (_exchanged, jax.lax.psum):
        on_all = partial(jax.shard_map, mesh=mesh, in_specs=rows, out_specs=whole, check_vma=False)
        local = on_all(lambda value, add=add: add(value, "data"))
        found.append(np.asarray(jax.jit(local)(x)))
    np.testing.assert_array_equal(found[0], found[1])
