"""A look-up as jax traces it: a primitive inside a `custom_vjp`, and one for its gradient."""

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxfleet.ops.tables import LOOKUP, LOOKUP_GRAD

PRIMITIVES = frozenset({LOOKUP, LOOKUP_GRAD})
_lookup_p = core.Primitive(LOOKUP)
_lookup_grad_p = core.Primitive(LOOKUP_GRAD)


def _lookup_type(_: Any, keys: Any, *, table: str, dim: int) -> Any:
    del table
    return jax.core.ShapedArray((*keys.shape, dim), np.dtype(np.float32))


def _lookup_grad_type(_: Any, __: Any, *, table: str) -> Any:
    del table
    return jax.core.ShapedArray((), np.dtype(np.float32))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def look_up(table: str, dim: int, handle: Any, keys: Any) -> Any:
    """Returns the rows of keys: `f32[..., dim]`."""
    return _lookup_p.bind(handle, keys, table=table, dim=dim)


def _forward(table: str, dim: int, handle: Any, keys: Any) -> tuple[Any, Any]:
    return _lookup_p.bind(handle, keys, table=table, dim=dim), keys


def _backward(table: str, _: int, keys: Any, gradient: Any) -> tuple[Any, None]:
    return _lookup_grad_p.bind(keys, gradient, table=table), None


_lookup_p.def_abstract_eval(_lookup_type)
_lookup_grad_p.def_abstract_eval(_lookup_grad_type)
look_up.defvjp(_forward, _backward)
