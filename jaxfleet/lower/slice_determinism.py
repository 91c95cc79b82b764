"""Compiler options under which a block gives the same bits on a slice as on all rows.

Sums, products, quotients and roots are rounded as IEEE 754 specifies once
`jaxfleet.ops.product_rounding` keeps each product from being fused with a sum. Other functions are
approximated, and XLA's approximation for vectors differs from the one for remainders and small
arrays: a few elements in a thousand then differ in their last digit. A block with such functions of
arrays is compiled without vectors and without fused products. On Adam over 4 MB, that takes two to
three times as long, so other blocks keep them. `tests/lower/test_slice_determinism.py` and
`tests/exact` check it, on x86 alone.
"""

import platform
from collections.abc import Iterator, Mapping

import jax

from jaxfleet.ir import Block, Operator, Program

_X86 = ("x86_64", "AMD64")  # values of `platform.machine`
_WITHOUT_CHOICE: Mapping[str, str | bool] = {
    "xla_cpu_max_isa": "AVX",  # the last without fused products
    "xla_cpu_prefer_vector_width": "64",  # bits: too few for vectors
}
_APPROXIMATED = frozenset(
    {
        "jax.acos",
        "jax.acosh",
        "jax.asin",
        "jax.asinh",
        "jax.atan",
        "jax.atan2",
        "jax.atanh",
        "jax.bessel_i0e",
        "jax.bessel_i1e",
        "jax.cbrt",
        "jax.cos",
        "jax.cosh",
        "jax.digamma",
        "jax.erf",
        "jax.erf_inv",
        "jax.erfc",
        "jax.exp",
        "jax.exp2",
        "jax.expm1",
        "jax.igamma",
        "jax.igammac",
        "jax.lgamma",
        "jax.log",
        "jax.log1p",
        "jax.logistic",
        "jax.polygamma",
        "jax.pow",
        "jax.regularized_incomplete_beta",
        "jax.sin",
        "jax.sinh",
        "jax.tan",
        "jax.tanh",
        "jax.zeta",
    }
)


def compiler_options(program: Program, block: Block) -> dict[str, str | bool]:
    """Returns XLA's compiler options for a block."""
    has_choice = jax.default_backend() == "cpu" and platform.machine() in _X86
    if has_choice and any(_approximates(program, b, op) for b, op in _operators(program, block)):
        return dict(_WITHOUT_CHOICE)
    return {}


def _operators(program: Program, block: Block) -> Iterator[tuple[Block, Operator]]:
    for op in block.ops:
        yield block, op
        for index in op.blocks:
            yield from _operators(program, program.blocks[index])


def _approximates(program: Program, block: Block, op: Operator) -> bool:
    """Whether an operator approximates, and for more than one number."""
    return op.type in _APPROXIMATED and any(program.lookup(w, block).shape for w in op.writes)
