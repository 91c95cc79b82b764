"""Cost of dropout that is the same on any number of devices, against one key per device.

    python benchmarks/dropout_rows.py [--quick]

A mask of 4096 x 1024 over 8 devices. Each device draws its own rows of the bits that one device
would draw; by hand, each draws as many bits from its own key, which costs the least but depends on
the number of devices. The bar is 1.02 times that, plus its spread.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import Bar, Plan, Side, compare, print_table, run
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxfleet as jf

AXIS = "devices"
ROWS, WIDTH, KEEP = 4096, 1024, 0.5
HEADS = ("", "own keys, ms", "own rows, ms", "ratio", "own keys/itself")


def dropped(key: Any, x: jax.Array) -> jax.Array:
    """Returns the sum of the rows after dropout."""
    return jnp.where(jax.random.bernoulli(key, KEEP, x.shape), x, 0).sum()


def measure(devices: int, plan: Plan) -> list[Bar]:
    def same_mask(key: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        new_key, drawn = jax.random.split(key)
        return new_key, dropped(drawn, x)

    def own_key(key: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        new_key, drawn = jax.random.split(key)
        mine = jax.random.fold_in(drawn, jax.lax.axis_index(AXIS))
        return new_key, jax.lax.psum(dropped(mine, x), AXIS)

    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    cut, whole = PartitionSpec(AXIS), PartitionSpec()
    mapped = jax.shard_map(
        own_key, mesh=mesh, in_specs=(whole, cut), out_specs=whole, check_vma=False
    )
    by_hand = jax.jit(mapped)
    rows = jax.device_put(np.ones((ROWS, WIDTH), np.float32), NamedSharding(mesh, cut))
    key = jax.device_put(jax.random.PRNGKey(0), NamedSharding(mesh, whole))
    strategy = jf.DistributedStrategy(donate=False)
    step = jf.distribute(same_mask, example=(key, rows), strategy=strategy)
    hand, again = (Side(by_hand, key, rows) for _ in range(2))
    times = compare(hand, Side(step, key, rows, waits=True), again, plan)
    where = f"{ROWS} x {WIDTH} bits on {devices} devices"
    shown = (f"{times.baseline_ms:.2f}", f"{times.candidate_ms:.2f}", f"{times.ratio:.3f}")
    print_table(HEADS, [(where, *shown, "{:.3f} to {:.3f}".format(*times.itself))])
    return [Bar(f"{where}: own rows over own keys", times.ratio, 1.02, times.spread)]


if __name__ == "__main__":
    run("dropout_rows", __file__, measure, device_counts=(8,))
