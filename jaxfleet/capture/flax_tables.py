"""Look-ups as modules of Flax; importing this needs Flax.

::

    from jaxfleet.capture.flax_tables import LinenEmbed, NnxEmbed

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            vectors = LinenEmbed(USERS)(ids)
"""

from typing import Any

import jax.numpy as jnp
from flax import linen, nnx

from jaxfleet.capture.tables import EmbeddingTable


class LinenEmbed(linen.Module):  # type: ignore[misc]  # Flax's modules have no types here
    """Looks rows up; its only parameter is what `EmbeddingTable.init` makes, called `handle`.

    `init` gives zeros for the rows: nothing else is known of them outside of a step.

    Attributes:
        table: what is looked up.
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
    """Looks rows up; its only parameter is what `EmbeddingTable.init` makes, called `handle`.

    Args:
        table: what is looked up.
    """

    def __init__(self, table: EmbeddingTable) -> None:
        self.table = table
        self.handle = nnx.Param(table.init())

    def __call__(self, keys: Any) -> Any:
        """Returns the rows of keys: `f32[..., dim]`."""
        return self.table(self.handle[...], keys)
