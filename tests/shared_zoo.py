"""Zoo programs, each built, captured and run on one device once per process.

Tests request them by name. Results of quick and full compilation are cached separately, since they
round differently.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import jaxfleet as jf
from tests.zoo import ZOO, Built, identity

Array = NDArray[Any]


def built_zoo(name: str) -> Built:
    """Returns a program with a wrapped optimizer, its state computed as the test compiles."""
    return _built(name, _compiles_quickly())


@cache
def _built(name: str, quickly: object) -> Built:  # the cache key
    return ZOO[name].build(jf.distributed_optimizer)


def captured_zoo(name: str) -> jf.Captured:
    return _captured(name, _compiles_quickly())


@cache
def _captured(name: str, quickly: object) -> jf.Captured:  # the cache key
    program = built_zoo(name)
    example = (program.state, program.batch(0, ZOO[name].rows))
    return jf.capture(program.train_step, example=example, name=name)


class OneDevice:
    """A program's plain function on one device; steps run on demand.

    Attributes:
        built: the program, with its unwrapped optimizer.
        step: its function, jitted.
    """

    def __init__(self, name: str) -> None:
        self.built = ZOO[name].build(identity)
        self.step = jax.jit(self.built.train_step)
        self._rows, self._state = ZOO[name].rows, self.built.state
        self._after: list[list[Array]] = []
        self._signature: Any = None

    def results(self, steps: int) -> list[list[Array]]:
        """Returns the leaves of state and metrics after each step.

        Raises:
            AssertionError: a value is not finite, or types change after the first step: no
                comparison is possible.
        """
        while len(self._after) < steps:
            batch = self.built.batch(len(self._after), self._rows)
            after = self._state, _ = self.step(self._state, batch)
            if not self._after:
                self._signature = _signature(after)
            where = f"of the plain function after step {len(self._after)}"
            assert _signature(after) == self._signature, f"other types {where}"
            assert _all_finite(after), f"values that are not finite {where}"
            self._after.append(arrays(after))
        return self._after[:steps]


def one_device(name: str) -> OneDevice:
    """Returns a program on one device, compiled as the running test is."""
    return _one_device(name, _compiles_quickly())


def _compiles_quickly() -> object:
    """Initial values differ by a bit, too: those of nnx's layers under JAX 0.12."""
    return jax.config.read("jax_disable_most_optimizations")


@cache
def _one_device(name: str, quickly: object) -> OneDevice:  # the cache key
    return OneDevice(name)


def arrays(tree: Any) -> list[Array]:
    """Returns the leaves as numpy arrays, random keys as their data."""
    return [np.asarray(_readable(leaf)) for leaf in jax.tree.leaves(tree)]


def _readable(leaf: Any) -> Any:
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _signature(tree: Any) -> Any:
    """Returns the tree's structure, and the type of each leaf."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [jax.typeof(leaf) for leaf in leaves]


def _all_finite(tree: Any) -> bool:
    leaves = [leaf for leaf in arrays(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return all(bool(np.isfinite(leaf).all()) for leaf in leaves)
