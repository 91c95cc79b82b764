"""Gradients that are not one array per parameter, and state derived from them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import CaptureError, PassError
from jaxfleet.ir import Kind

ROWS, FEATURES, OUT = 8, 4, 2
STRATEGY = jf.DistributedStrategy(devices=2, donate=False)
State = dict[str, Any]


def params() -> dict[str, jax.Array]:
    w = jnp.arange(1.0, 1.0 + FEATURES * OUT).reshape(FEATURES, OUT) / 10
    return {"b": jnp.full(OUT, 0.1), "w": w}


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(ROWS, FEATURES)).astype(np.float32)
    return {"x": x, "y": draw.normal(size=(ROWS, OUT)).astype(np.float32)}


def outputs(params: Any, batch: Any) -> jax.Array:
    return jnp.tanh(batch["x"] @ params["w"] + params["b"])


def loss(params: Any, batch: Any) -> jax.Array:
    return jnp.square(outputs(params, batch) - batch["y"]).mean()


def of_each_example(tx: Any) -> tuple[Any, State]:
    """Returns a step that passes per-example gradients to its optimizer, as DP-SGD does."""

    def of_one(params: Any, example: Any) -> jax.Array:
        return loss(params, jax.tree.map(lambda leaf: leaf[None], example))

    def step(state: State, batch: Any) -> tuple[State, Any]:
        grads = jax.vmap(jax.grad(of_one), (None, 0))(state["params"], batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {}

    return step, {"params": params(), "opt": tx.init(params())}


def of_a_pair(tx: Any) -> tuple[Any, State]:
    """Returns a step whose parameters are a pair, of which the first is differentiated."""

    def step(state: State, batch: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"].fast, batch)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    pair = optax.LookaheadParams.init_synced(params())
    return step, {"params": pair, "opt": tx.init(pair)}


def weighed_by_norms(tx: Any) -> tuple[Any, State]:
    """Returns a step whose losses are weighted by the norms of their gradients, as in GradNorm."""

    def losses(params: Any, batch: Any) -> jax.Array:
        found = outputs(params, batch)
        return jnp.stack([jnp.square(found - batch["y"]).mean(), jnp.abs(found).mean()])

    def step(state: State, batch: Any) -> tuple[State, Any]:
        def norm(task: int) -> jax.Array:
            grads = jax.grad(lambda p: losses(p, batch)[task])(state["params"])
            return jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(grads)))

        def weighed(params: Any) -> jax.Array:
            return (state["weights"] * losses(params, batch)).sum()

        value, grads = jax.value_and_grad(weighed)(state["params"])
        norms = jnp.stack([norm(0), norm(1)])
        weights = 0.9 * state["weights"] + 0.1 * norms.mean() / norms
        updates, opt = tx.update(grads, state["opt"], state["params"])
        new = optax.apply_updates(state["params"], updates)
        return {"params": new, "opt": opt, "weights": weights}, value

    return step, {"params": params(), "opt": tx.init(params()), "weights": jnp.ones(2)}


def weighed_by_a_norm_of_single_elements(tx: Any) -> tuple[Any, State]:
    """Returns a step whose loss is weighted by a norm, also of gradients with a single element."""

    def of(params: Any, batch: Any) -> jax.Array:
        return params["scale"] * (batch["x"] @ params["w"] + params["b"])[:, 0]

    def step(state: State, batch: Any) -> tuple[State, Any]:
        def loss(params: Any) -> jax.Array:
            return jnp.square(of(params, batch) - batch["y"][:, 0]).mean()

        norm = optax.tree.norm(jax.grad(loss)(state["params"]))
        value, grads = jax.value_and_grad(lambda p: state["weight"] * loss(p))(state["params"])
        weight = 0.9 * state["weight"] + 0.1 / norm
        updates, opt = tx.update(grads, state["opt"], state["params"])
        new = optax.apply_updates(state["params"], updates)
        return {"params": new, "opt": opt, "weight": weight}, value

    single = {"b": jnp.zeros(1), "scale": jnp.ones(()), "w": jnp.ones((FEATURES, 1))}
    return step, {"params": single, "opt": tx.init(single), "weight": jnp.ones(())}


def beside_a_target(tx: Any) -> tuple[Any, State]:
    """Returns a step whose optimizer gets no parameters, where a target has the same leaves."""

    def step(state: State, batch: Any) -> tuple[State, Any]:
        def apart(params: Any) -> jax.Array:
            return jnp.square(outputs(params, batch) - outputs(state["target"], batch)).mean()

        value, grads = jax.value_and_grad(lambda p: apart(p) + loss(p, batch))(state["online"])
        updates, opt = tx.update(grads, state["opt"])
        new = optax.apply_updates(state["online"], updates)
        target = optax.incremental_update(new, state["target"], 0.1)
        return {"online": new, "opt": opt, "target": target}, value

    return step, {"online": params(), "opt": tx.init(params()), "target": params()}


def dpsgd() -> optax.GradientTransformation:
    """Returns an optimizer that clips per-example gradients and adds noise, as DP-SGD does."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        leaves, structure = jax.tree.flatten(updates)
        norms = jnp.sqrt(sum(jnp.square(x).reshape(x.shape[0], -1).sum(1) for x in leaves))
        scale = jnp.minimum(1.0, 0.1 / norms)
        key, *keys = jax.random.split(state, len(leaves) + 1)
        clipped = [jnp.tensordot(scale, x, 1) / x.shape[0] for x in leaves]
        noisy = [
            x + 0.01 * jax.random.normal(k, x.shape) for x, k in zip(clipped, keys, strict=True)
        ]
        return jax.tree.unflatten(structure, noisy), key

    noise = optax.GradientTransformation(lambda _: jax.random.PRNGKey(0), update)
    return optax.chain(noise, optax.sgd(0.1))


def lookahead() -> Any:
    return optax.lookahead(optax.sgd(0.1), sync_period=2, slow_step_size=0.5)


CASES: dict[str, tuple[Any, Any, set[str]]] = {
    "each example": (of_each_example, dpsgd, {"params/b", "params/w"}),
    "a pair": (of_a_pair, lookahead, {"params/fast/b", "params/fast/w"}),
    "norms": (weighed_by_norms, lambda: optax.sgd(0.1), {"params/b", "params/w"}),
    "norms of single elements": (
        weighed_by_a_norm_of_single_elements,
        lambda: optax.sgd(0.1),
        {"params/b", "params/scale", "params/w"},
    ),
    "beside a target": (beside_a_target, lambda: optax.sgd(0.1), {"online/b", "online/w"}),
}


def built(name: str) -> tuple[Any, State]:
    build, optimizer, _ = CASES[name]
    made: tuple[Any, State] = build(jf.distributed_optimizer(optimizer()))
    return made


@pytest.mark.parametrize("name", CASES)
def test_only_what_is_differentiated_is_a_parameter(name: str) -> None:
    step, state = built(name)
    program = jf.capture(step, example=(state, batch())).program
    assert {v.name for v in program.of_kind(Kind.PARAM)} == CASES[name][2]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_such_a_step_gives_on_devices_what_one_gives(name: str) -> None:
    step, state = built(name)
    trained, expected, found = jf.distribute(step, (state, batch()), STRATEGY), state, state
    for seed in range(2):
        expected, _ = jax.jit(step)(expected, batch(seed))
        found, _ = trained(found, batch(seed))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if not jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_such_a_step_gives_over_servers_what_one_device_gives(name: str) -> None:
    step, state = built(name)
    found = jf.verify(step, state, [batch(0), batch(1)])
    assert found.same_on_all
    assert found.largest < 1e-5


def test_gradients_of_each_example_are_not_added_up_over_calls() -> None:
    step, state = built("each example")
    merging = jf.DistributedStrategy(devices=1, merge=2)
    with pytest.raises(PassError, match="'params/b@GRAD' has a gradient for each example"):
        jf.distribute(step, (state, batch()), merging)


@pytest.mark.parametrize("wrapped", ["inner", "outer"])
def test_where_an_update_is_differentiated_both_optimizers_are_to_be_wrapped(wrapped: str) -> None:
    inner: Any = optax.sgd(0.1, momentum=0.9)
    outer: Any = optax.sgd(0.1)
    if wrapped == "inner":
        inner = jf.distributed_optimizer(inner)
    else:
        outer = jf.distributed_optimizer(outer)

    def step(state: State, batch: Any) -> tuple[State, Any]:
        def after(rate: jax.Array) -> tuple[jax.Array, Any]:
            grads = jax.grad(loss)(state["params"], batch)
            updates, opt = inner.update(grads, state["opt"], state["params"])
            moved = jax.tree.map(lambda leaf: leaf * jnp.exp(rate), updates)
            new = optax.apply_updates(state["params"], moved)
            return loss(new, batch), (new, opt)

        (value, (new, opt)), grad = jax.value_and_grad(after, has_aux=True)(state["rate"])
        updates, outer_opt = outer.update(grad, state["outer"], state["rate"])
        rate = optax.apply_updates(state["rate"], updates)
        return {"params": new, "opt": opt, "rate": rate, "outer": outer_opt}, value

    rate = jnp.zeros(())
    state = {"params": params(), "opt": inner.init(params()), "rate": rate}
    with pytest.raises(CaptureError, match="does not pass through distributed_optimizer") as got:
        jf.capture(step, example=({**state, "outer": outer.init(rate)}, batch()))
    assert any("wrap both" in note for note in got.value.__notes__)
