"""Reductions, contractions and convolutions: remaining rows and partial sums."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.analysis.on_devices import Family, check, every_way

REDUCTIONS: Family = {
    "over rows": lambda s, b: (b.x.sum(0), b.x.max(0), b.x.min(0), b.x.prod(0)),
    "over features": lambda s, b: (b.x.sum(1), b.x.max(1), b.x.min(1), b.x.prod(1)),
    "over everything": lambda s, b: (b.x.sum(), b.x.max(), b.x.min(), b.x.prod()),
    "over an axis before the rows": lambda s, b: b.t.transpose(1, 0, 2).sum(0),
    "of booleans": lambda s, b: (b.m.any(), b.m.all(), b.m.sum(), b.m.max(), b.m.min()),
    "of booleans along features": lambda s, b: ((b.x > 0).any(1), (b.x > 0).all(1)),
    "of integers": lambda s, b: (b.k.sum(), b.k.max(), b.k.min(), b.k.prod()),
    "of bits": lambda s, b: (
        lax.reduce_and(b.k | 8, (0,)),
        lax.reduce_or(b.k, (0,)),
        lax.reduce_xor(b.k, (0,)),
    ),
    "of bits along features": lambda s, b: (
        lax.reduce_and(b.ids | 8, (1,)),
        lax.reduce_or(b.ids, (1,)),
        lax.reduce_xor(b.ids, (1,)),
    ),
    "of small integers": lambda s, b: [
        f(b.k.astype(d))
        for f in (jnp.max, jnp.min)
        for d in (jnp.int8, jnp.uint8, jnp.int16, jnp.uint32)
    ],
    "sums of small integers": lambda s, b: [
        jnp.sum(b.k.astype(d), dtype=d) for d in (jnp.int8, jnp.uint8, jnp.int16, jnp.uint32)
    ],
    "of half floats": lambda s, b: [
        f(b.x.astype(d)) for f in (jnp.max, jnp.min, jnp.sum) for d in (jnp.float16, jnp.bfloat16)
    ],
    "of a number that is none": lambda s, b: (lambda z: (z.max(0), z.min(0), z.sum(0)))(
        jnp.where(b.x > 1, jnp.nan, b.x)
    ),
    "of infinity": lambda s, b: (lambda z: (z.max(0), z.min(0)))(jnp.where(b.x > 0, -jnp.inf, b.x)),
    "a sum of a sum": lambda s, b: b.t.sum(0).sum(0).sum(),
    "a maximum of a sum": lambda s, b: b.x.sum(0).max(),
    "a maximum of a maximum": lambda s, b: b.x.max(0).max(),
    "a sum of maxima": lambda s, b: b.x.max(0).sum() + b.x.max(1).sum(),
    "softmax over features": lambda s, b: jax.nn.softmax(b.x),
    "softmax over rows": lambda s, b: jax.nn.softmax(b.x, axis=0),
    "log-sum-exp over everything": lambda s, b: jax.nn.logsumexp(b.x),
    "a variance": lambda s, b: (b.x.var(0), b.x.std()),
    "a norm": lambda s, b: jnp.linalg.norm(b.x),
    "the place of the largest, along features": lambda s, b: (b.x.argmax(1), b.x.argmin(1)),
    "the place of the largest, along rows": lambda s, b: (b.x.argmax(0), b.x.argmin(0)),
    "the place of the largest, with ties": lambda s, b: (
        b.k.argmax(),
        b.k.argmin(),
        b.k.max() == b.k,
    ),
    "the place of the largest, of all": lambda s, b: b.x.argmax(),
    "the place of the largest of a sum": lambda s, b: b.x.sum(0).argmax(),
    "a median": lambda s, b: jnp.median(b.x, axis=0),
    "a general reduction": lambda s, b: lax.reduce(
        b.x, jnp.float32(0), lambda x, y: x + y + 0 * x, (1,)
    ),
    "a general reduction of rows": lambda s, b: lax.reduce(
        (b.x, b.y), (jnp.float32(0),) * 2, lambda x, y: (x[0] + y[0], x[1] * 0 + y[1] + x[1]), (0,)
    ),
}
PRODUCTS: Family = {
    "rows by a matrix": lambda s, b: b.x @ s.w,
    "a matrix by rows": lambda s, b: s.w.T @ b.x.T,
    "rows by rows, contracted": lambda s, b: b.x.T @ b.y,
    "rows by what is cut to match": lambda s, b: jnp.ones(b.x.shape[0]) @ b.x,
    "what is cut to match by rows": lambda s, b: b.x.T @ jnp.ones(b.x.shape[0]),
    "rows by rows, one beside the other": lambda s, b: jnp.einsum("bi,bi->b", b.x, b.y),
    "rows by rows, one beside the other, batch last": lambda s, b: jnp.einsum(
        "bti,bi->tb", b.t, b.x
    ),
    "rows by rows, crossed": lambda s, b: b.x @ b.y.T,
    "rows by rows, crossed and summed": lambda s, b: (b.x @ b.y.T).sum(0),
    "rows by rows, crossed and traced": lambda s, b: jnp.trace(b.x @ b.y.T),
    "attention over steps": lambda s, b: jnp.einsum("bqi,bki->bqk", b.t, b.t),
    "attention over rows": lambda s, b: jax.nn.softmax(b.x @ b.x.T) @ b.y,
    "crossed, then contracted by the first": lambda s, b: jnp.einsum("ab,ai->bi", b.x @ b.y.T, b.x),
    "crossed, then contracted by the second": lambda s, b: jnp.einsum(
        "ab,bi->ai", b.x @ b.y.T, b.x
    ),
    "batch on the second operand": lambda s, b: jnp.einsum(
        "tij,btj->bti", s.table[:4, :, None] + s.v, b.t
    ),
    "a batch axis that every device has": lambda s, b: jnp.einsum("bti,tj->btij", b.t, s.table[:4]),
    "a batch axis beside": lambda s, b: jnp.einsum("bti,tij->btj", b.t, s.table[:4, :, None] + s.v),
    "contracted with a batch axis beside": lambda s, b: jnp.einsum("bti,btj->tij", b.t, b.t),
    "outer": lambda s, b: jnp.einsum("bi,bj->bij", b.x, b.y),
    "outer of rows": lambda s, b: jnp.outer(b.o, b.o),
    "a sum by a matrix": lambda s, b: b.x.sum(0) @ s.w,
    "a matrix by a sum": lambda s, b: s.w.T @ b.x.sum(0),
    "a sum by a sum": lambda s, b: b.x.sum(0) @ b.y.sum(0),
    "a sum by rows": lambda s, b: b.y @ b.x.sum(0),
    "a sum by rows, contracted": lambda s, b: (b.x.T @ b.y) @ (b.y.T @ b.x),
    "a sum by itself": lambda s, b: (lambda g: g @ g)(b.x.T @ b.x),
    "integers": lambda s, b: b.ids.T @ b.ids,
    "half floats": lambda s, b: b.x.astype(jnp.bfloat16).T @ b.y.astype(jnp.bfloat16),
    "half floats kept wide": lambda s, b: jnp.matmul(
        b.x.astype(jnp.bfloat16).T, b.y.astype(jnp.bfloat16), preferred_element_type=jnp.float32
    ),
    "a gradient": lambda s, b: jax.grad(lambda w: jnp.tanh(b.x @ w).mean())(s.w),
    "a gradient of a gradient": lambda s, b: jax.grad(
        lambda v: (jax.grad(lambda w: jnp.tanh(b.x @ w).mean())(v) ** 2).sum()
    )(s.w),
    "gradients of rows": lambda s, b: jax.vmap(
        jax.grad(lambda w, x: jnp.tanh(x @ w).sum()), (None, 0)
    )(s.w, b.x),
    "linear algebra of rows": lambda s, b: jnp.linalg.cholesky(
        jnp.einsum("bti,bsi->bts", b.t, b.t) + 3 * jnp.eye(4)
    ),
    "linear algebra of a sum": lambda s, b: jnp.linalg.cholesky(b.x.T @ b.x + jnp.eye(6)),
    "singular values of rows": lambda s, b: jnp.linalg.svd(b.t, compute_uv=False),
    "a decomposition of rows": lambda s, b: jnp.abs(jnp.linalg.qr(b.t.transpose(0, 2, 1))[1]),
    "a matrix as long as the rows": lambda s, b: jnp.abs(jnp.linalg.qr(b.x)[1]),
    "linear algebra of rows and a matrix": lambda s, b: lax.linalg.triangular_solve(
        jnp.broadcast_to(jnp.eye(6) * 2, (b.t.shape[0], 6, 6)), b.t, left_side=False
    ),
    "eigenvalues of a sum": lambda s, b: jnp.linalg.eigvalsh(b.x.T @ b.x),
}


def conv(x: Any, kernel: Any, *, numbers: Any = ("NHWC", "HWIO", "NHWC"), **options: Any) -> Any:
    return lax.conv_general_dilated(
        x, kernel, options.pop("strides", (1, 1)), "SAME", dimension_numbers=numbers, **options
    )


def kernel_gradient(b: Any, kernel: Any, **options: Any) -> Any:
    return jax.grad(lambda k: (conv(b.image, k, **options) ** 2).mean())(kernel)


CONVOLUTIONS: Family = {
    "rows": lambda s, b: conv(b.image, s.kernel),
    "rows with strides": lambda s, b: conv(b.image, s.kernel, strides=(2, 2)),
    "rows on another axis": lambda s, b: conv(
        b.image.transpose(3, 1, 2, 0), s.kernel, numbers=("CHWN", "HWIO", "NCHW")
    ),
    "depthwise": lambda s, b: conv(b.image, s.kernel[:, :, :1], feature_group_count=2),
    "grouped": lambda s, b: conv(b.image, s.kernel[:, :, :1], feature_group_count=2),
    "dilated": lambda s, b: conv(b.image, s.kernel, rhs_dilation=(2, 2)),
    "a kernel's gradient": lambda s, b: kernel_gradient(b, s.kernel),
    "a strided kernel's gradient": lambda s, b: kernel_gradient(b, s.kernel, strides=(2, 2)),
    "a depthwise kernel's gradient": lambda s, b: kernel_gradient(
        b, s.kernel[:, :, :1], feature_group_count=2
    ),
    "an image's gradient": lambda s, b: jax.grad(lambda x: (conv(x, s.kernel) ** 2).mean())(
        b.image
    ),
    "a depthwise image's gradient": lambda s, b: jax.grad(
        lambda x: (conv(x, s.kernel[:, :, :1], feature_group_count=2) ** 2).mean()
    )(b.image),
    "a transposed convolution": lambda s, b: lax.conv_transpose(b.image, s.kernel, (2, 2), "SAME"),
    "a transposed convolution's gradient": lambda s, b: jax.grad(
        lambda k: (lax.conv_transpose(b.image, k, (2, 2), "SAME") ** 2).mean()
    )(s.kernel),
    "a sum as a kernel": lambda s, b: conv(
        b.image, b.t.sum(0)[:, :, None, None][:3, :3] * jnp.ones((1, 1, 2, 4))
    ),
    "a sum as an image": lambda s, b: conv(b.image.sum(0, keepdims=True), s.kernel),
    "a kernel of its own for each row": lambda s, b: jax.vmap(
        lambda x, k: conv(x[None], s.kernel * k)
    )(b.image, b.o),
    "rows as pixels": lambda s, b: conv(b.image.transpose(1, 0, 2, 3)[:, :, :, :], s.kernel).sum(),
    "a window's mean": lambda s, b: lax.reduce_window(
        b.image, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
    ),
    "a window's maximum": lambda s, b: lax.reduce_window(
        b.image, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "SAME"
    ),
    "a window over rows": lambda s, b: lax.reduce_window(b.x, 0.0, lax.add, (2, 1), (1, 1), "SAME"),
    "a window over a sum": lambda s, b: lax.reduce_window(
        b.x.sum(0), 0.0, lax.add, (2,), (1,), "SAME"
    ),
    "gradient of a window's maximum": lambda s, b: jax.grad(
        lambda x: (
            lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") ** 2
        ).mean()
    )(b.image),
    "gradient of a window's mean": lambda s, b: jax.grad(
        lambda x: (
            lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "SAME") ** 2
        ).mean()
    )(b.image),
    "gradient of a window over rows": lambda s, b: jax.grad(
        lambda x: (lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME") ** 2).sum()
    )(b.x),
}
NUMBERED: Family = {
    "a kernel of its own for each row, and its gradient": lambda s, b: jax.grad(
        lambda o: (jax.vmap(lambda x, k: conv(x[None], s.kernel * k))(b.image, o) ** 2).sum()
    )(b.o),
    "rows in groups": lambda s, b: conv(
        b.image, jnp.tile(s.kernel, (1, 1, 1, 2)), batch_group_count=2
    ),
    "rows in many groups": lambda s, b: conv(
        b.image, jnp.tile(s.kernel, (1, 1, 1, 2)), batch_group_count=8
    ),
    "gradient of rows in groups": lambda s, b: kernel_gradient(
        b, jnp.tile(s.kernel, (1, 1, 1, 2)), batch_group_count=4
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("devices", "letter"), every_way((4, False), (2, True)))
@pytest.mark.parametrize(
    "family", [REDUCTIONS, PRODUCTS, CONVOLUTIONS], ids=["reductions", "products", "convolutions"]
)
def test_what_is_reduced_or_contracted(family: Family, devices: int, *, letter: bool) -> None:
    check(family, devices=devices, letter=letter)


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_convolutions_in_groups_of_rows(devices: int) -> None:
    check(NUMBERED, devices=devices, letter=False)
