"""Operators defined by StableHLO: primitives without a rule here.

`exported(artifact, x, ...)` runs the export of one primitive by `jax.export`, Pallas kernels among
them. The artifact is a constant of the program, bytes as `u8[n]`, so it is stored with the program
by digest, as every constant is, and a process runs it without the library that it came from.

    y: f32[b,4] = exported(const.0, x) {inputs=["f32[b,4]"], name="pallas_call",
                                        outputs=["f32[b,4]"], platforms=["cpu", "cuda", "tpu"]}
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Attrs, Operator, parse_size
from jaxfleet.ir.variable import type_text
from jaxfleet.ops import jax_adapter
from jaxfleet.ops.jax_adapter import Equation
from jaxfleet.ops.registry import Array, Context, register_op

_PLATFORMS = ("cpu", "cuda", "tpu")


def export_primitive(eqn: Equation) -> tuple[np.ndarray[Any, Any], Attrs]:
    """Returns a primitive's StableHLO as bytes, `u8[n]`, and the attributes of its operator.

    It is exported for every platform if possible, else for the current one; jax raises if it cannot
    be exported.
    """
    primitive = eqn.primitive

    def run(*args: Any) -> tuple[Any, ...]:
        found = primitive.bind(*args, **eqn.params)
        return tuple(found) if primitive.multiple_results else (found,)

    types = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars]
    function = jax.jit(run, keep_unused=True)
    try:
        found = export.export(function, platforms=_PLATFORMS)(*types)
    except Exception:  # noqa: BLE001  # most kernels are of one platform
        found = export.export(function)(*types)
    attrs = Attrs(
        {
            "inputs": tuple(map(_type, types)),
            "name": primitive.name,
            "outputs": tuple(_type(x.aval) for x in eqn.outvars),
            "platforms": tuple(found.platforms),
        }
    )
    return np.frombuffer(found.mlir_module_serialized, np.uint8), attrs


@register_op("exported")
def _run(_: Context, op: Operator, args: Sequence[Array]) -> list[Array]:
    artifact, *rest = args
    if isinstance(artifact, jax.core.Tracer):
        what = "exported: its artifact is not a constant of the program"
        raise ProgramError(
            what, op=op, hint="keep the first input of 'exported' as it was captured"
        )
    texts = (op.attrs["inputs"], op.attrs["outputs"], op.attrs["platforms"])
    return list(_callable(np.asarray(artifact).tobytes(), *texts).call(*map(jnp.asarray, rest)))


@functools.lru_cache(maxsize=64)
def _callable(module: bytes, inputs: Any, outputs: Any, platforms: Any) -> Any:
    """Returns a callable for jax: a module of the same types, with this one's StableHLO.

    `Exported.deserialize` would need another package for the contents of the operator's attributes.
    """
    scope = export.SymbolicScope()
    types = [_spec(text, scope) for text in inputs]
    results = [_spec(text, scope) for text in outputs]

    def like(*_: Any) -> tuple[Any, ...]:
        return tuple(_zeros(x) for x in results)

    function = jax.jit(like, keep_unused=True)
    empty = export.export(function, platforms=platforms)(*types)
    return dataclasses.replace(empty, mlir_module_serialized=module)


def _type(value: Any) -> str:
    shape = jax_adapter.shape_text(value.shape)
    return type_text(jax_adapter.dtype_text(value.dtype), shape)


def _spec(text: str, scope: Any) -> jax.ShapeDtypeStruct:
    dtype, _, rest = text.partition("[")
    sizes = [parse_size(size) for size in rest.removesuffix("]").split(",") if size]
    shape = [
        size if isinstance(size, int) else export.symbolic_shape(str(size), scope=scope)[0]
        for size in sizes
    ]
    return jax.ShapeDtypeStruct(shape, _dtype(dtype))


def _dtype(text: str) -> Any:
    if not text.startswith("key<"):
        return jax_adapter.numpy_dtype(text)
    return next(key.dtype for key in _keys() if jax_adapter.dtype_text(key.dtype) == text)


def _zeros(spec: jax.ShapeDtypeStruct) -> Array:
    if not jnp.issubdtype(spec.dtype, jax.dtypes.prng_key):
        return jnp.zeros(spec.shape, spec.dtype)
    return jnp.broadcast_to(next(key for key in _keys() if key.dtype == spec.dtype), spec.shape)


def _keys() -> list[Array]:
    return [jax.random.key(0, impl=name) for name in ("threefry2x32", "rbg", "unsafe_rbg")]
