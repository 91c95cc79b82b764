"""The `jax.` dialect: jax's primitives as operators.

Most primitives run by `bind` with their parameters. Those with sub-computations have separate
attributes here, the same on every JAX line, and run through `jax.lax`; so do those that are not
among jax's public primitives.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Block, Operator, Size, block_of
from jaxfleet.ir.op_traits import JAX_PREFIX
from jaxfleet.ops import jax_adapter
from jaxfleet.ops.registry import Array, Context, Dialect, Meaning, OpDef, register_dialect


def define(op_type: str) -> OpDef:
    """Returns the meaning of a `jax.` operator; raises a ProgramError if this JAX line lacks it."""
    name = op_type.removeprefix(JAX_PREFIX)
    special = _SPECIAL.get(name)
    if special is not None:
        return OpDef(op_type, special)
    if jax_adapter.find_primitive(name) is None:
        what = f"jax {jax.__version__} makes no primitive '{name}' public"
        raise ProgramError(what, hint="the program was captured on another JAX line")
    return OpDef(op_type, _bind)


def is_described(op_type: str) -> bool:
    """Whether a `jax.` operator runs through `jax.lax`, not by its primitive's name."""
    return op_type.removeprefix(JAX_PREFIX) in _SPECIAL


def _bind(ctx: Context, op: Operator, args: Sequence[Array]) -> list[Array]:
    return jax_adapter.bind(op.type.removeprefix(JAX_PREFIX), args, op.attrs, ctx.size)


def _attr(ctx: Context, op: Operator, name: str) -> Any:
    return jax_adapter.decode(op.attrs.get(name), ctx.size)


def _block(ctx: Context, op: Operator, name: str) -> Block:
    return block_of(ctx.program, op.attrs[name])


def _scan(ctx: Context, op: Operator, args: Sequence[Array]) -> list[Array]:
    body = _block(ctx, op, "body")
    num_consts, num_carry = _attr(ctx, op, "num_consts"), _attr(ctx, op, "num_carry")
    consts, rest = list(args[:num_consts]), args[num_consts:]
    init, xs = tuple(rest[:num_carry]), tuple(rest[num_carry:])

    def step(carry: Any, slices: Any) -> tuple[Any, Any]:
        results = ctx.run_block(body, [*consts, *carry, *slices])
        return tuple(results[:num_carry]), tuple(results[num_carry:])

    carry, ys = lax.scan(
        step,
        tuple(jnp.asarray(value) for value in init),
        xs,
        length=_attr(ctx, op, "length"),
        reverse=_attr(ctx, op, "reverse"),
        unroll=_attr(ctx, op, "unroll"),
    )
    return [*carry, *ys]


def _while(ctx: Context, op: Operator, args: Sequence[Array]) -> list[Array]:
    cond, body = _block(ctx, op, "cond"), _block(ctx, op, "body")
    cond_count, body_count = _attr(ctx, op, "cond_nconsts"), _attr(ctx, op, "body_nconsts")
    cond_consts = list(args[:cond_count])
    body_consts = list(args[cond_count : cond_count + body_count])
    init = tuple(jnp.asarray(value) for value in args[cond_count + body_count :])
    final = lax.while_loop(
        lambda carry: ctx.run_block(cond, [*cond_consts, *carry])[0],
        lambda carry: tuple(ctx.run_block(body, [*body_consts, *carry])),
        init,
    )
    return list(final)


def _cond(ctx: Context, op: Operator, args: Sequence[Array]) -> list[Array]:
    refs = op.attrs["branches"]
    assert isinstance(refs, tuple)
    blocks = [block_of(ctx.program, ref) for ref in refs]
    branches = [
        (lambda *operands, block=block: tuple(ctx.run_block(block, operands))) for block in blocks
    ]
    platforms = op.attrs.get("platforms")
    if isinstance(platforms, tuple):
        return _by_platform(platforms, branches, args[1:])
    return list(lax.switch(args[0], branches, *args[1:]))


def _by_platform(
    platforms: Sequence[Any], branches: Sequence[Callable[..., Any]], args: Sequence[Array]
) -> list[Array]:
    """Runs the branch for the current platform; the others are not compiled."""
    pairs = list(zip(platforms, branches, strict=True))
    default = next((branch for names, branch in pairs if names is None), None)
    chosen = {name: branch for names, branch in pairs if names is not None for name in names}
    return list(lax.platform_dependent(*args, default=default, **chosen))


def _remat(ctx: Context, op: Operator, args: Sequence[Array]) -> list[Array]:
    """Runs the recomputation after a barrier, which keeps XLA from merging it with the first run.

    jax itself lowers a differentiated `checkpoint` the same way.
    """
    prevent = _attr(ctx, op, "prevent_cse")
    operands = list(args)
    if _attr(ctx, op, "differentiated") and prevent:
        flags = prevent if isinstance(prevent, tuple) else (True,) * len(operands)
        behind = [x for x, flag in zip(operands, flags, strict=True) if flag]
        held = iter(lax.optimization_barrier(behind))
        operands = [next(held) if f else x for x, f in zip(operands, flags, strict=True)]
    return ctx.run_block(_block(ctx, op, "body"), operands)


def _reduce(ctx: Context, op: Operator, args: Sequence[Array]) -> list[Array]:
    body, half = _block(ctx, op, "body"), len(args) // 2
    result = lax.reduce(
        tuple(args[:half]),
        tuple(args[half:]),
        lambda x, y: tuple(ctx.run_block(body, [*x, *y])),
        _attr(ctx, op, "dimensions"),
    )
    return list(result)


def _scatter(function: Callable[..., Array]) -> Meaning:
    def meaning(ctx: Context, op: Operator, args: Sequence[Array]) -> list[Array]:
        names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        numbers, is_sorted, is_unique, mode = (_attr(ctx, op, name) for name in names)
        operand, indices, updates = args
        result = function(
            operand,
            indices,
            updates,
            numbers,
            indices_are_sorted=is_sorted,
            unique_indices=is_unique,
            mode=mode,
        )
        return [result]

    return meaning


def _dim_value(ctx: Context, op: Operator, _: Sequence[Array]) -> list[Array]:
    size = op.attrs["dim"]
    assert isinstance(size, Size)
    return [jnp.asarray(ctx.size(size), dtype=_attr(ctx, op, "dtype"))]


def _random_wrap(ctx: Context, op: Operator, args: Sequence[Array]) -> list[Array]:
    return [jax.random.wrap_key_data(jnp.asarray(args[0]), impl=_attr(ctx, op, "impl"))]


def _random_unwrap(_: Context, __: Operator, args: Sequence[Array]) -> list[Array]:
    return [jax.random.key_data(args[0])]


def _random_seed(ctx: Context, op: Operator, args: Sequence[Array]) -> list[Array]:
    return [jax.random.key(args[0], impl=_attr(ctx, op, "impl"))]


_SPECIAL: Mapping[str, Meaning] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "remat2": _remat,
    "reduce": _reduce,
    "scatter": _scatter(lax.scatter),
    "scatter-add": _scatter(lax.scatter_add),
    "scatter-mul": _scatter(lax.scatter_mul),
    "scatter-min": _scatter(lax.scatter_min),
    "scatter-max": _scatter(lax.scatter_max),
    "dim_value": _dim_value,
    "random_wrap": _random_wrap,
    "random_unwrap": _random_unwrap,
    "random_seed": _random_seed,
}


register_dialect(Dialect(JAX_PREFIX, define))
