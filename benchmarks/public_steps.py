"""Measures jaxfleet's collective step against jax's own partitioning of the same program.

    python benchmarks/public_steps.py [--quick]

Small programs of the kinds that public examples train: a transformer, layers in a `scan`, sharpness
aware minimization, L-BFGS with a line search, a variational autoencoder, embeddings of a click
model, a mixture of experts. jax gets the one-device step under `jit` with the batch cut by a
`NamedSharding`; jaxfleet gets the same step. Both donate, train from the same state on 4 devices
emulated on the CPU, and wait for every step. Bar: at most 1.1 times the time, plus the spread of
jax's step against itself; and no more floating point operations or temporary bytes than jax's by
more than a hundredth.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import Bar, Plan, Side, compare, print_table, run
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxfleet as jf

AXIS = "devices"
ROWS = 64
WIDTH = 64
LENGTH = 16
LAYERS = 4
WORDS = 128
EXPERTS = 4
HEADS = ("", "jit, ms", "jaxfleet, ms", "ratio", "jit/itself", "flops", "temporary bytes")
Params = dict[str, Any]
Wrap = Callable[[Any], Any]
TrainStep = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Program:
    """A training step, made with a wrapper of its optimizer, with where it starts."""

    name: str
    make: Callable[[Wrap], TrainStep]
    state: Any
    batch: Any


def measure(devices: int, plan: Plan) -> list[Bar]:
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(AXIS))
    bars: list[Bar] = []
    table: list[Sequence[str]] = []
    for program in programs():
        state, batch = jax.device_put(program.state, whole), jax.device_put(program.batch, rows)
        theirs = jax.jit(program.make(lambda tx: tx), donate_argnums=0)
        ours = jf.distribute(program.make(jf.distributed_optimizer), (state, batch), "collective")
        a, again = (Side(theirs, state, batch) for _ in range(2))
        flops, held = _over(_counted(ours), _counted(theirs.lower(state, batch).compile()))
        times = compare(a, Side(ours, state, batch, waits=True), again, plan)
        name = f"{program.name} on {devices} devices"
        table.append(
            (
                name,
                f"{times.baseline_ms:.2f}",
                f"{times.candidate_ms:.2f}",
                f"{times.ratio:.3f}",
                "{:.3f} to {:.3f}".format(*times.itself),
                f"{flops:.3f}",
                f"{held:.3f}",
            )
        )
        bars.append(Bar(f"{name}: time over jit", times.ratio, 1.1, times.spread))
        bars.append(Bar(f"{name}: flops over jit", flops, 1.01))
        bars.append(Bar(f"{name}: temporary bytes over jit", held, 1.01))
    print_table(HEADS, table)
    return bars


def _counted(compiled: Any) -> tuple[float, float]:
    """Returns the flops and the temporary bytes of one device, as XLA counts them."""
    held: float = compiled.memory_analysis().temp_size_in_bytes
    return float(compiled.cost_analysis()["flops"]), held


def _over(ours: tuple[float, float], theirs: tuple[float, float]) -> tuple[float, float]:
    return ours[0] / theirs[0], ours[1] / theirs[1]


def programs() -> list[Program]:
    words = _batch(lambda r: r.integers(0, WORDS, (ROWS, LENGTH)).astype(np.int32))
    points = _batch(lambda r: r.normal(size=(ROWS, WIDTH)).astype(np.float32))
    clicks = _batch(lambda r: r.integers(0, WORDS, (ROWS, 8)).astype(np.int32))
    adam = optax.adam(1e-3)
    return [
        _trained("transformer", _language_loss(_unrolled), _layers(), words, adam),
        _trained("layers in a scan", _language_loss(_scanned), _layers(), words, adam),
        _sharpness_aware(points),
        _line_search(points),
        _trained("variational autoencoder", _elbo, _autoencoder(), points, adam),
        _trained("click model", _click_loss, _clicks(), clicks, adam),
        _trained("mixture of experts", _experts_loss, _experts(), points, adam),
    ]


def _trained(name: str, loss: Any, params: Params, batch: Any, optimizer: Any) -> Program:
    def make(wrap: Wrap) -> TrainStep:
        tx = wrap(optimizer)

        def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
            value, grads = jax.value_and_grad(loss)(state["params"], batch)
            updates, opt = tx.update(grads, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

        return train_step

    return Program(name, make, {"params": params, "opt": optimizer.init(params)}, batch)


def _sharpness_aware(batch: Any) -> Program:
    params, optimizer = _autoencoder(), optax.sgd(1e-3, momentum=0.9)

    def make(wrap: Wrap) -> TrainStep:
        tx = wrap(optimizer)

        def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
            grads = jax.grad(_elbo)(state["params"], batch)
            norm = optax.global_norm(grads)
            worse = jax.tree.map(lambda p, g: p + 0.05 * g / norm, state["params"], grads)
            value, grads = jax.value_and_grad(_elbo)(worse, batch)
            updates, opt = tx.update(grads, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

        return train_step

    return Program(
        "sharpness aware", make, {"params": params, "opt": optimizer.init(params)}, batch
    )


def _line_search(batch: Any) -> Program:
    params = {"w": jnp.zeros((WIDTH, WIDTH))}
    optimizer = optax.lbfgs(memory_size=4)

    def loss(params: Params, batch: Any) -> jax.Array:
        return jnp.square(jnp.tanh(batch @ params["w"]) - batch).mean()

    def make(wrap: Wrap) -> TrainStep:
        tx = wrap(optimizer)

        def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
            value, grads = jax.value_and_grad(loss)(state["params"], batch)
            updates, opt = tx.update(
                grads, state["opt"], state["params"], value=value, grad=grads,
                value_fn=lambda p: loss(p, batch),
            )  # fmt: skip
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

        return train_step

    return Program("L-BFGS", make, {"params": params, "opt": optimizer.init(params)}, batch)


def _language_loss(run_layers: Any) -> Any:
    def loss(params: Params, words: Any) -> jax.Array:
        h = run_layers(params["layers"], params["words"][words])
        logits = h[:, :-1] @ params["words"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, words[:, 1:]).mean()

    return loss


def _unrolled(layers: Params, h: Any) -> Any:
    for number in range(LAYERS):
        h = _layer(jax.tree.map(lambda x, n=number: x[n], layers), h)
    return h


def _scanned(layers: Params, h: Any) -> Any:
    return lax.scan(lambda h, layer: (_layer(layer, h), None), h, layers)[0]


def _layer(layer: Params, h: Any) -> Any:
    heads = [(h @ layer[name]).reshape(*h.shape[:2], 4, -1) for name in ("q", "k", "v")]
    scores = jnp.einsum("bthd,bshd->bhts", heads[0], heads[1]) / 4
    causal = jnp.tril(jnp.ones((h.shape[1], h.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    h = h + jnp.einsum("bhts,bshd->bthd", weights, heads[2]).reshape(h.shape) @ layer["o"]
    return h + jax.nn.gelu(h @ layer["up"]) @ layer["down"]


def _layers() -> Params:
    square, wide = (LAYERS, WIDTH, WIDTH), (LAYERS, WIDTH, 4 * WIDTH)
    shapes = dict.fromkeys("qkvo", square) | {"up": wide, "down": (LAYERS, 4 * WIDTH, WIDTH)}
    return {"layers": _drawn(shapes), "words": _drawn({"words": (WORDS, WIDTH)})["words"]}


def _elbo(params: Params, x: Any) -> jax.Array:
    mean, spread = jnp.split(jax.nn.relu(x @ params["in"]) @ params["code"], 2, axis=-1)
    z = mean + jnp.exp(spread) * jax.random.normal(jax.random.key(0), mean.shape)
    found = jax.nn.relu(z @ params["decode"]) @ params["out"]
    divergence = jnp.square(mean) + jnp.exp(2 * spread) - 2 * spread - 1
    return jnp.square(found - x).mean() + 0.1 * divergence.mean()


def _autoencoder() -> Params:
    wide = 4 * WIDTH
    return _drawn(
        {"in": (WIDTH, wide), "code": (wide, 32), "decode": (16, wide), "out": (wide, WIDTH)}
    )


def _click_loss(params: Params, ids: Any) -> jax.Array:
    rows = jnp.stack([params[f"table{n}"][ids[:, n]] for n in range(8)], axis=1)
    pairs = jnp.einsum("bnd,bmd->bnm", rows, rows).reshape(ids.shape[0], -1)
    score = (jax.nn.relu(pairs @ params["in"]) @ params["out"])[:, 0]
    clicked = (ids[:, 0] % 2).astype(jnp.float32)
    return jnp.mean(optax.sigmoid_binary_cross_entropy(score, clicked))


def _clicks() -> Params:
    tables = {f"table{n}": (WORDS, 16) for n in range(8)}
    return _drawn({**tables, "in": (64, WIDTH), "out": (WIDTH, 1)})


def _experts_loss(params: Params, x: Any) -> jax.Array:
    chances = jax.nn.softmax(x @ params["gate"])
    best, chosen = lax.top_k(chances, 2)
    gates = (jax.nn.one_hot(chosen, EXPERTS) * best[..., None]).sum(1)
    hidden = jax.nn.relu(jnp.einsum("bi,eij->bej", x, params["up"]))
    found = jnp.einsum("bej,eji,be->bi", hidden, params["down"], gates)
    return jnp.square(found - x).mean() + 0.01 * jnp.square(chances.mean(0)).sum()


def _experts() -> Params:
    up = (EXPERTS, WIDTH, WIDTH)
    return _drawn({"gate": (WIDTH, EXPERTS), "up": up, "down": up})


def _drawn(shapes: Mapping[str, tuple[int, ...]]) -> Params:
    generator = np.random.default_rng(0)
    return {
        name: jnp.asarray(generator.normal(size=shape) / shape[-2] ** 0.5, jnp.float32)
        for name, shape in shapes.items()
    }


def _batch(draw: Callable[[np.random.Generator], Any]) -> Any:
    return draw(np.random.default_rng(1))


if __name__ == "__main__":
    run("public_steps", __file__, measure, device_counts=(4,))
