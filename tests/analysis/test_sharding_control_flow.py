"""Loops, branches and recomputation, with rows and partial sums as inputs, carries and outputs."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.analysis.on_devices import (
    Batch,
    Family,
    State,
    check,
    every_way,
    make_batch,
    make_state,
    rewritten,
)


def loop(body: Any, carry: Any, xs: Any, **options: Any) -> Any:
    return lax.scan(body, carry, xs, **options)


def steps(b: Any) -> Any:
    return b.t.transpose(1, 0, 2)


SCANS: Family = {
    "rows carried": lambda s, b: loop(lambda c, _: (c * s.v, c.sum(1)), b.x, None, length=3),
    "rows carried, scanned over steps": lambda s, b: loop(
        lambda c, x: (c + x, jnp.tanh(c)), b.x, steps(b)
    ),
    "nothing carried": lambda s, b: loop(lambda c, x: (c, x * 2), None, steps(b)),
    "zeros carried that become rows": lambda s, b: loop(
        lambda c, x: (c + x, c), jnp.zeros_like(b.x), steps(b)
    ),
    "a summand carried": lambda s, b: loop(lambda c, x: (c + x.sum(), None), 0.0, steps(b)),
    "a summand carried from one": lambda s, b: loop(
        lambda c, x: (c + x.sum(), None), 1.0, steps(b)
    ),
    "a summand carried and looked at": lambda s, b: loop(
        lambda c, x: (c + x.sum(), jnp.tanh(c)), 0.0, steps(b)
    ),
    "a summand carried and squared": lambda s, b: loop(
        lambda c, x: (c**2 + x.sum(), None), 0.5, steps(b)
    ),
    "a summand given out": lambda s, b: loop(lambda c, x: (c, x.sum(0)), 0.0, steps(b)),
    "a summand carried in and multiplied": lambda s, b: loop(
        lambda c, x: (c * 0.5, c), b.x.sum(0), None, length=3
    ),
    "summands scanned": lambda s, b: loop(lambda c, x: (c + x, x * 2), jnp.zeros(6), b.t.sum(0)),
    "summands scanned and looked at": lambda s, b: loop(
        lambda c, x: (c + x, jnp.exp(x)), jnp.zeros(6), b.t.sum(0)
    ),
    "a summand closed over": lambda s, b: (
        lambda t: loop(lambda c, x: (c + t * x.sum(), None), 0.0, steps(b))
    )(b.y.sum()),
    "a summand closed over and added": lambda s, b: (
        lambda t: loop(lambda c, x: (c + t, None), jnp.zeros(6), None, length=3)
    )(b.y.sum(0)),
    "what every device has": lambda s, b: loop(lambda c, w: (jnp.tanh(c * w), c), s.v, s.table),
    "layers": lambda s, b: loop(lambda c, w: (jnp.tanh(c * w), None), b.x, s.table),
    "gradient of layers": lambda s, b: jax.grad(
        lambda t: (loop(lambda c, w: (jnp.tanh(c * w), c), b.x, t)[0] ** 2).mean()
    )(s.table),
    "gradient over steps": lambda s, b: jax.grad(
        lambda v: (loop(lambda c, x: (jnp.tanh(c * v + x), None), b.x, steps(b))[0] ** 2).mean()
    )(s.v),
    "gradient of layers with statistics": lambda s, b: jax.grad(
        lambda t: (loop(lambda c, w: ((c - c.mean(0)) * w, c.mean()), b.x, t)[0] ** 2).mean()
    )(s.table),
    "in reverse": lambda s, b: loop(lambda c, x: (c * 0.5 + x, c), b.x, steps(b), reverse=True),
    "unrolled": lambda s, b: loop(lambda c, x: (c * 0.5 + x, c), b.x, steps(b), unroll=2),
    "nested": lambda s, b: loop(
        lambda c, x: loop(lambda d, y: (d + y * x.sum(), d.sum(0)), c, steps(b)), b.x * 0, steps(b)
    ),
    "nested, with summands": lambda s, b: loop(
        lambda c, x: loop(lambda d, y: (d + (y * x).sum(), None), c, steps(b))[0:1] + (c,),
        0.0,
        steps(b),
    ),
    "a long delay": lambda s, b: loop(
        lambda c, x: ((x, *c[:-1]), c[-1]),
        tuple(jnp.zeros_like(b.x) + i for i in range(12)),
        jnp.concatenate([steps(b)] * 4),
    ),
    "a long delay of sums": lambda s, b: loop(
        lambda c, x: ((x.sum(), *c[:-1]), jnp.exp(c[-1])),
        (0.0,) * 12,
        jnp.concatenate([steps(b)] * 4),
    ),
    "a swap": lambda s, b: loop(
        lambda c, _: ((c[1], c[0]), None), (b.x, s.v + jnp.zeros_like(b.x)), None, length=3
    ),
    "a swap of a sum": lambda s, b: loop(
        lambda c, _: ((c[1], c[0]), None), (b.x.sum(), s.s), None, length=3
    ),
    "a sum that becomes a row's": lambda s, b: loop(
        lambda c, x: (x.max(0), c.sum()), b.x.sum(0), steps(b)
    ),
    "a transposed carry": lambda s, b: loop(
        lambda c, _: (c.T * 1.5, None), b.x @ b.y.T, None, length=3
    ),
    "a count of turns": lambda s, b: lax.fori_loop(0, 3, lambda i, c: c * 0.5 + i, b.x),
    "a turn for each row": lambda s, b: lax.fori_loop(0, b.x.shape[0], lambda i, c: c + i, 0),
    "random numbers in a loop": lambda s, b: loop(
        lambda k, x: (jax.random.split(k)[0], jax.random.normal(k, x.shape) + x), s.keys, steps(b)
    ),
    "a maximum of rows": lambda s, b: loop(
        lambda c, x: (jnp.maximum(c, x.max(0)), None), jnp.full(6, -jnp.inf), steps(b)
    ),
    "an unused carry": lambda s, b: loop(
        lambda c, x: ((c[0], c[1] + 1), x.sum()), (b.x, 0), steps(b)
    ),
}
BY_ROWS: Family = {
    "over rows": lambda s, b: lax.map(lambda x: jnp.tanh(x) @ s.w, b.x),
    "over rows in reverse": lambda s, b: loop(
        lambda c, x: (None, x.sum()), None, b.x, reverse=True
    ),
    "over rows with a sum": lambda s, b: (lambda t: lax.map(lambda x: jnp.tanh(x) * t, b.x))(
        b.y.sum(0)
    ),
    "over rows and what every device has": lambda s, b: lax.map(
        lambda z: z[0] + z[1], (b.o, jnp.arange(b.o.shape[0]) * s.s)
    ),
    "over rows, each against all": lambda s, b: lax.map(
        lambda x: jnp.exp(-((x - b.y) ** 2).sum(1)).sum(), b.x
    ),
    "over rows, with a broadcast to rows": lambda s, b: lax.map(
        lambda x: (jnp.broadcast_to(x, b.x.shape) * s.v).sum(0), b.x
    ),
    "over rows, counting rows": lambda s, b: lax.map(
        lambda x: (jnp.arange(b.x.shape[0]) * x).sum() / b.x.shape[0], b.o
    ),
    "over rows, drawing for rows": lambda s, b: lax.map(
        lambda k: jax.random.bits(jax.random.fold_in(s.keys, k), b.o.shape).sum(), b.k
    ),
    "over rows, with a branch": lambda s, b: lax.map(
        lambda x: lax.cond(x > 0, jnp.sin, jnp.cos, x), b.o
    ),
    "over rows, with a loop": lambda s, b: lax.map(
        lambda x: lax.while_loop(lambda c: c < 100, lambda c: c * 2 + 1, jnp.abs(x)), b.o
    ),
    "over rows, with a scan": lambda s, b: lax.map(
        lambda t: loop(lambda c, x: (c * x, c), s.v, t), b.t
    ),
    "over rows, carrying": lambda s, b: loop(lambda c, x: (c * 0.5 + x, c), s.v, b.x),
    "over rows, carrying rows": lambda s, b: loop(lambda c, x: (c * 0.5 + x, c.sum()), b.x, b.o),
    "over rows, summing": lambda s, b: loop(lambda c, x: (c + x, None), 0.0, b.o),
    "over rows, with all of them": lambda s, b: loop(
        lambda c, x: (c + (x * b.y).sum(), c * b.y.mean()), 0.0, b.x
    ),
    "over rows, growing to rows": lambda s, b: loop(
        lambda c, x: (c + jnp.broadcast_to(x, b.x.shape), None), jnp.zeros(b.x.shape), b.x
    ),
    "gradient over rows": lambda s, b: jax.grad(
        lambda w: lax.map(lambda x: jnp.tanh(x @ w).sum(), b.x).mean()
    )(s.w),
    "gradient over rows that are carried on": lambda s, b: jax.grad(
        lambda v: loop(lambda c, x: (jnp.tanh(c * v + x), None), s.v, b.x)[0].sum()
    )(s.v),
}
BRANCHES: Family = {
    "by what every device has": lambda s, b: lax.cond(
        s.s > 1, lambda x: x * 2, lambda x: x - 1, b.x
    ),
    "by a sum": lambda s, b: lax.cond(b.x.sum() > 0, lambda x: x * 2, lambda x: x - 1, b.x),
    "by an integer sum": lambda s, b: lax.switch(b.m.sum() % 3, [jnp.sin, jnp.cos, jnp.tanh], b.x),
    "by a row": lambda s, b: lax.cond(b.o[0] > 0, lambda x: x * 2, lambda x: x - 1, b.x),
    "by a maximum": lambda s, b: lax.cond(b.x.max() > 1, lambda x: x.sum(), lambda x: x.max(), b.x),
    "rows in one branch": lambda s, b: lax.cond(s.s > 1, lambda: b.x, lambda: jnp.ones_like(b.x)),
    "a sum in one branch": lambda s, b: lax.cond(s.s > 1, lambda: b.x.sum(), lambda: s.s),
    "a sum in the other branch": lambda s, b: lax.cond(s.s > 9, lambda: b.x.sum(), lambda: s.s),
    "a sum and rows": lambda s, b: lax.cond(
        s.s > 1, lambda: b.x.T @ b.x + 0 * s.table[:6], lambda: s.table[:6]
    ),
    "a sum that one branch looks at": lambda s, b: (
        lambda t: lax.cond(s.s > 9, jnp.exp, lambda z: z * 2, t)
    )(b.x.sum(0)),
    "a sum that the other branch looks at": lambda s, b: (
        lambda t: lax.cond(s.s > 9, lambda z: z * 2, jnp.exp, t)
    )(b.x.sum(0)),
    "a sum that one branch looks at, taken": lambda s, b: (
        lambda t: lax.cond(s.s > 1, jnp.exp, lambda z: z * 2, t)
    )(b.x.sum(0)),
    "a sum passed through": lambda s, b: (
        lambda t: lax.cond(s.s > 1, lambda z: z, lambda z: z * 2, t)
    )(b.x.sum(0)),
    "a sum passed through one and looked at": lambda s, b: (
        lambda t: lax.cond(s.s > 1, lambda z: (z, z), lambda z: (z, jnp.exp(z)), t)
    )(b.x.sum(0)),
    "different cuts": lambda s, b: lax.cond(
        s.s > 1,
        lambda: b.o[:, None] * jnp.ones_like(b.o),
        lambda: b.o[None] * jnp.ones_like(b.o)[:, None],
    ),
    "in a loop": lambda s, b: loop(
        lambda c, x: (lax.cond(c > 0, lambda: c - x.sum(), lambda: c + x.sum()), c), 0.0, steps(b)
    ),
    "gradient": lambda s, b: jax.grad(
        lambda w: lax.cond(b.x.sum() > 0, lambda: (b.x @ w).mean(), lambda: (b.x @ w).max())
    )(s.w),
    "a constant": lambda s, b: lax.cond(s.s > 1, lambda: 1.0, lambda: b.x.sum()),
    "nothing": lambda s, b: lax.cond(s.s > 1, lambda: jnp.zeros(6), lambda: b.x.sum(0)),
}
WHILES: Family = {
    "rows": lambda s, b: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.5), (0, b.x)
    ),
    "until a maximum is small": lambda s, b: lax.while_loop(
        lambda x: jnp.abs(x).max() > 0.1, lambda x: x * 0.5, b.x
    ),
    "until a sum is small": lambda s, b: lax.while_loop(
        lambda x: (x**2).sum() > 0.1, lambda x: x * 0.5, b.x
    ),
    "until all rows are": lambda s, b: lax.while_loop(
        lambda c: (c[0] < 10).any(), lambda c: (c[0] + c[1], c[1]), (b.k, b.k + 1)
    ),
    "a sum": lambda s, b: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.5), (0, b.x.sum())
    ),
    "a sum that is looked at": lambda s, b: lax.while_loop(
        lambda c: c > 0.1, lambda c: c * 0.5, jnp.abs(b.x).sum()
    ),
    "a sum that grows": lambda s, b: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + b.x.sum()), (0, s.s)
    ),
    "what becomes rows": lambda s, b: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + b.x), (0, jnp.zeros_like(b.x))
    ),
    "a bound that is a sum": lambda s, b: lax.while_loop(
        lambda c: c[0] < b.m.sum(), lambda c: (c[0] + 1, c[1] * 0.9), (0, b.x)
    ),
    "a bound that rows closed over make": lambda s, b: lax.while_loop(
        lambda c: c < b.x.max(), lambda c: c + 0.25, 0.0
    ),
    "a condition on a sum of a carry": lambda s, b: lax.while_loop(
        lambda c: c[1] < 20,
        lambda c: (c[0] * 1.5, c[1] + jnp.abs(c[0]).sum()),
        (b.x, jnp.float32(0)),
    ),
    "a long delay": lambda s, b: lax.while_loop(
        lambda c: c[0] < 15,
        lambda c: (c[0] + 1, b.x.sum(), *c[1:-1]),
        (0, *[s.s + i for i in range(11)]),
    ),
    "a power iteration": lambda s, b: lax.fori_loop(
        0, 3, lambda i, v: (lambda u: u / jnp.linalg.norm(u))(b.x.T @ (b.x @ v)), s.v
    ),
    "a normalization in turns": lambda s, b: lax.fori_loop(
        0, 3, lambda i, p: (lambda q: q / q.sum(0))(p / p.sum(1, keepdims=True)), jnp.exp(b.x)
    ),
}
REMATS: Family = {
    "rows": lambda s, b: jax.grad(lambda w: jax.checkpoint(lambda x: jnp.tanh(x @ w).mean())(b.x))(
        s.w
    ),
    "statistics": lambda s, b: jax.grad(
        lambda v: jax.checkpoint(lambda x: jnp.tanh((x - x.mean(0)) * v).sum())(b.x)
    )(s.v),
    "a sum closed over": lambda s, b: jax.grad(
        lambda v: (lambda t: jax.checkpoint(lambda x: jnp.tanh(x * v * t).sum())(b.x))(b.y.sum(0))
    )(s.v),
    "a scan": lambda s, b: jax.grad(
        lambda t: jax.checkpoint(
            lambda x: (loop(lambda c, w: (jnp.tanh(c * w), None), x, t)[0] ** 2).mean()
        )(b.x)
    )(s.table),
    "in a scan": lambda s, b: jax.grad(
        lambda t: (
            loop(jax.checkpoint(lambda c, w: (jnp.tanh(c * w), c.mean(0))), b.x, t)[0] ** 2
        ).mean()
    )(s.table),
    "with random numbers": lambda s, b: jax.grad(
        lambda v: jax.checkpoint(
            lambda x: (jax.random.bernoulli(s.keys, 0.5, x.shape) * jnp.sin(x * v)).sum()
        )(b.x)
    )(s.v),
    "nested": lambda s, b: jax.grad(
        lambda v: jax.checkpoint(
            lambda x: jax.checkpoint(lambda y: jnp.tanh(y * v).mean(0))(x).sum()
        )(b.x)
    )(s.v),
    "of a map": lambda s, b: jax.grad(
        lambda w: lax.map(jax.checkpoint(lambda x: jnp.tanh(x @ w).sum()), b.x).mean()
    )(s.w),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("devices", "letter"), every_way((2, True), (4, False)))
@pytest.mark.parametrize(
    "family",
    [SCANS, BY_ROWS, BRANCHES, WHILES, REMATS],
    ids=["scans", "by rows", "branches", "whiles", "remats"],
)
def test_loops_and_branches(family: Family, devices: int, *, letter: bool) -> None:
    check(family, devices=devices, letter=letter)


def test_a_branch_that_hands_on_a_complete_value_takes_part_in_no_all_reduce() -> None:
    """L-BFGS takes the gradient that its line search left, and seldom recomputes it."""

    def step(state: State, batch: Batch) -> tuple[State, Any]:
        new = lax.cond(state.s > 1, lambda: state.v, lambda: batch.x.sum(0))
        return state._replace(v=jnp.tanh(new)), None

    program, _ = rewritten(step, make_state(), make_batch(), devices=2, letter=True)
    reducing = [
        block.index
        for block in program.blocks
        if any(op.type == "c_allreduce_sum" for op in block.ops)
    ]
    assert len(reducing) == 1
    assert reducing != [0]
