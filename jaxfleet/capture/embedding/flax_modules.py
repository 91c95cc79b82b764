"""Look-ups as Flax modules; importing this module requires Flax.

::

    from jaxfleet.capture.embedding.flax_modules import LinenEmbed, NnxEmbed

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            vectors = LinenEmbed(USERS)(ids)
"""

from typing import Any

import jax.numpy as jnp
from flax import linen, nnx

from jaxfleet.capture.embedding.tables import EmbeddingTable


class LinenEmbed(linen.Module):  # type: ignore[misc]  # Flax's modules have no types here
    """Looks up rows; its only parameter is the result of `EmbeddingTable.init`, called `handle`.

    `init` returns zeros for the rows, whose values are unknown outside of a step.

    Attributes:
        table: the table.
    """

    table: EmbeddingTable

    @linen.compact  # type: ignore[untyped-decorator]  # as above
    def __call__(self, keys: Any) -> Any:
        """Returns the rows of keys: `f32[..., dim]`."""
        handle = self.param("handle", lambda _: self.table.init())
        if self.is_initializing() and not self.table.is_dense:
            return jnp.zeros((*jnp.shape(keys), self.table.spec.dim), jnp.float32)
        return self.table(handle, keys)


class NnxEmbed(nnx.Module):  # type: ignore[misc]  # as above
    """Looks up rows; its only parameter is the result of `EmbeddingTable.init`, called `handle`.

    Args:
        table: the table.
    """

    def __init__(self, table: EmbeddingTable) -> None:
        self.table = table
        self.handle = nnx.Param(table.init())

    def __call__(self, keys: Any) -> Any:
        """Returns the rows of keys: `f32[..., dim]`."""
        return self.table(self.handle[...], keys)
