"""Language models, in the styles of several libraries."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from jax import lax

from public.program import ROWS, Program, TrainStep, Wrap, drawn, numbers, started, trained, updated

WIDTH, HEADS, LENGTH, LAYERS, WORDS = 64, 4, 32, 4, 256


def programs() -> list[Program]:
    words = numbers(WORDS, ROWS, LENGTH)
    adam = optax.adamw(1e-3)
    return [
        trained("transformer, by hand", _by_hand(_unrolled), _layers(), words, adam),
        trained("layers in lax.scan", _by_hand(_scanned), _layers(), words, adam),
        _nnx("nnx.scan over layers", Stacked(nnx.Rngs(0, dropout=1)), words),
        _nnx("nanoLM (nnx)", Listed(nnx.Rngs(0, dropout=1)), words),
        _lm1b(words),
        _haiku_style(words),
        _keras_style(words),
    ]


def _mean_loss(logits: Any, words: Any) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], words[:, 1:])
    return losses.mean()


def _by_hand(run_layers: Any) -> Any:
    def loss(params: Any, words: Any) -> jax.Array:
        h = run_layers(params["layers"], params["words"][words])
        return _mean_loss(h @ params["words"].T, words)

    return loss


def _unrolled(layers: Any, h: Any) -> Any:
    for number in range(LAYERS):
        h = _layer(jax.tree.map(lambda x, n=number: x[n], layers), h)
    return h


def _scanned(layers: Any, h: Any) -> Any:
    return lax.scan(lambda h, layer: (_layer(layer, h), None), h, layers)[0]


def _layer(layer: Mapping[str, Any], h: Any) -> Any:
    heads = [(h @ layer[name]).reshape(*h.shape[:2], HEADS, -1) for name in ("q", "k", "v")]
    scores = jnp.einsum("bthd,bshd->bhts", heads[0], heads[1]) / 4
    causal = jnp.tril(jnp.ones((h.shape[1], h.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    h = h + jnp.einsum("bhts,bshd->bthd", weights, heads[2]).reshape(h.shape) @ layer["o"]
    return h + jax.nn.gelu(h @ layer["up"]) @ layer["down"]


def _layers() -> Any:
    square = {n: drawn(LAYERS, WIDTH, WIDTH, seed=i) / 8 for i, n in enumerate("qkvo")}
    wide = {
        "up": drawn(LAYERS, WIDTH, 4 * WIDTH) / 8,
        "down": drawn(LAYERS, 4 * WIDTH, WIDTH) / 16,
    }
    return {"layers": {**square, **wide}, "words": drawn(WORDS, WIDTH) / 8}


class Block(nnx.Module):
    """A block of a transformer: attention and two linear layers, with dropout after each."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.drops = nnx.List([nnx.Dropout(0.1, rngs=rngs) for _ in range(2)])

    def __call__(self, x: Any) -> Any:
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.drops[0](self.attention(self.norms[0](x), mask=mask))
        return x + self.drops[1](self.down(nnx.gelu(self.up(self.norms[1](x)))))


class Stacked(nnx.Module):
    """A language model whose blocks are one module with a leading axis."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.words = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Block, in_axes=0, out_axes=0))
        self.blocks = make(rngs)
        self.last = nnx.Linear(WIDTH, WORDS, rngs=rngs)

    def __call__(self, words: Any) -> Any:
        x = self.words(words) + self.places(jnp.arange(words.shape[1]))

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: Any, block: Block) -> Any:
            return block(x)

        return self.last(run(x, self.blocks))


class Listed(nnx.Module):
    """The same, its blocks in a list."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.words = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.last = nnx.Linear(WIDTH, WORDS, rngs=rngs)

    def __call__(self, words: Any) -> Any:
        x = self.words(words) + self.places(jnp.arange(words.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def _nnx(name: str, model: nnx.Module, batch: Any) -> Program:
    """Returns a program around `nnx.Optimizer`; the state is that of model and optimizer."""
    optimizer = optax.adamw(1e-3)
    state = nnx.state((model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)))

    def make(wrap: Wrap) -> TrainStep:
        graph = nnx.graphdef((model, nnx.Optimizer(model, wrap(optimizer), wrt=nnx.Param)))

        def loss(model: Any, words: Any) -> jax.Array:
            return _mean_loss(model(words), words)

        def train_step(state: Any, words: Any) -> tuple[Any, Any]:
            model, optimizer = nnx.merge(graph, state)
            value, grads = nnx.value_and_grad(loss)(model, words)
            optimizer.update(model, grads)
            return nnx.state((model, optimizer)), value

        return train_step

    return Program(name, make, state, batch)


class Layer(linen.Module):
    """A block as in flax's lm1b."""

    @linen.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        y = linen.LayerNorm()(x)
        y = linen.MultiHeadDotProductAttention(
            HEADS, use_bias=False, dropout_rate=0.1, deterministic=False, broadcast_dropout=False
        )(y, mask=mask)
        x = x + linen.Dropout(0.1, deterministic=False)(y)
        y = linen.Dense(4 * WIDTH)(linen.LayerNorm()(x))
        y = linen.Dropout(0.1, deterministic=False)(linen.relu(y))
        return x + linen.Dropout(0.1, deterministic=False)(linen.Dense(WIDTH)(y))


class Decoder(linen.Module):
    """A language model as in flax's lm1b: inputs shifted, logits from the embedding."""

    @linen.compact
    def __call__(self, words: Any) -> Any:
        embed = linen.Embed(WORDS, WIDTH, embedding_init=linen.initializers.normal(1.0))
        shifted = jnp.pad(words, ((0, 0), (1, 0)))[:, :-1]
        places = self.param("places", linen.initializers.normal(0.02), (1, LENGTH, WIDTH))
        x = linen.Dropout(0.1, deterministic=False)(embed(shifted) + places)
        mask = linen.combine_masks(
            linen.make_attention_mask(words > 0, words > 0), linen.make_causal_mask(words)
        )
        for _ in range(LAYERS):
            x = Layer()(x, mask)
        return embed.attend(linen.LayerNorm()(x)) / WIDTH**0.5


def _lm1b(words: Any) -> Program:
    model = Decoder()
    params = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, words[:1])
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
    optimizer = optax.adamw(schedule, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)

    def make(wrap: Wrap) -> TrainStep:
        tx = wrap(optimizer)

        def train_step(state: Any, words: Any) -> tuple[Any, Any]:
            key = jax.random.fold_in(state["key"], state["step"])
            weights = (words > 0).astype(jnp.float32)

            def loss(params: Any) -> Any:
                logits = model.apply(params, words, rngs={"dropout": key})
                soft = optax.smooth_labels(jax.nn.one_hot(words, WORDS), 0.1)
                losses = -(soft * jax.nn.log_softmax(logits)).sum(-1) * weights
                return losses.sum() / weights.sum(), logits

            (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
            right = ((logits.argmax(-1) == words) * weights).sum()
            new = updated(tx, state, grads)
            metrics = {"loss": value, "accuracy": right, "denominator": weights.sum()}
            return {**new, "step": state["step"] + 1}, metrics

        return train_step

    state = started(optimizer, params, key=jax.random.key(2), step=jnp.zeros((), jnp.int32))
    return Program("lm1b (linen)", make, state, words)


def _haiku_style(words: Any) -> Program:
    """A transformer as in haiku's example: flat parameters, keys split at every dropout."""
    names = [f"h{n}_" for n in range(LAYERS)]
    params: dict[str, dict[str, Any]] = {"words": {"w": drawn(WORDS, WIDTH) / 8}}
    params["places"] = {"w": drawn(LENGTH, WIDTH) / 8}
    for name in names:
        for part, inner, outer in (
            *((f"attn/{n}", WIDTH, WIDTH) for n in ("query", "key", "value", "linear")),
            ("mlp/up", WIDTH, 4 * WIDTH),
            ("mlp/down", 4 * WIDTH, WIDTH),
        ):
            params[name + part] = {"w": drawn(inner, outer) / inner**0.5, "b": jnp.zeros(outer)}
        for part in ("ln_1", "ln_2"):
            params[name + part] = {"scale": jnp.ones(WIDTH), "offset": jnp.zeros(WIDTH)}
    params["out"] = {"w": drawn(WIDTH, WORDS) / 8, "b": jnp.zeros(WORDS)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3, b2=0.99))

    def linear(p: Any, x: Any) -> Any:
        return jnp.dot(x, p["w"]) + p["b"]

    def norm(p: Any, x: Any) -> Any:
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return p["scale"] * (x - mean) * lax.rsqrt(variance + 1e-5) + p["offset"]

    def forward(params: Any, key: Any, words: Any) -> Any:
        x = params["words"]["w"][words] + params["places"]["w"]
        causal = jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH)))
        for name in names:
            key, first, second = jax.random.split(key, 3)
            y = norm(params[name + "ln_1"], x)
            q, k, v = (
                linear(params[f"{name}attn/{n}"], y).reshape(*y.shape[:-1], HEADS, -1)
                for n in ("query", "key", "value")
            )
            scores = jnp.einsum("...thd,...Thd->...htT", q, k) * (WIDTH // HEADS) ** -0.5
            weights = jax.nn.softmax(jnp.where(causal, scores, -1e30))
            y = jnp.einsum("...htT,...Thd->...thd", weights, v).reshape(x.shape)
            x = x + dropped(first, linear(params[name + "attn/linear"], y))
            y = linear(params[name + "mlp/up"], norm(params[name + "ln_2"], x))
            x = x + dropped(second, linear(params[name + "mlp/down"], jax.nn.gelu(y)))
        return linear(params["out"], x)

    def dropped(key: Any, x: Any) -> Any:
        return x * jax.random.bernoulli(key, 0.9, x.shape) / 0.9

    def make(wrap: Wrap) -> TrainStep:
        tx = wrap(optimizer)

        def train_step(state: Any, words: Any) -> tuple[Any, Any]:
            key, own = jax.random.split(state["key"])

            def loss(params: Any) -> jax.Array:
                return _mean_loss(forward(params, own, words), words)

            value, grads = jax.value_and_grad(loss)(state["params"])
            new = updated(tx, state, grads)
            norm = optax.global_norm(grads)
            return {**new, "key": key, "step": state["step"] + 1}, {"loss": value, "norm": norm}

        return train_step

    state = started(optimizer, params, key=jax.random.PRNGKey(3), step=jnp.zeros((), jnp.int32))
    return Program("transformer, haiku style", make, state, words)


def _keras_style(words: Any) -> Program:
    """A classifier as in keras's `stateless_call`: lists of variables, keys of counters."""
    shapes = [(WORDS, WIDTH), (LENGTH, WIDTH), *[(WIDTH, WIDTH)] * 4, (WIDTH, 4 * WIDTH)]
    shapes += [(4 * WIDTH, WIDTH), (WIDTH, 2)]
    weights = [drawn(*shape, seed=n) / shape[0] ** 0.5 for n, shape in enumerate(shapes)]
    trainable = [*map(jnp.asarray, weights), *(jnp.ones(WIDTH) for _ in range(4)), jnp.zeros(2)]
    seeds = [jnp.array([n, 0], jnp.uint32) for n in range(2)]

    def forward(variables: Any, seeds: Any, words: Any) -> Any:
        table, places, q, k, v, o, up, down, last, *norms, bias = variables
        x, after = table[words] + places, []
        layer = {"q": q, "k": k, "v": v, "o": o, "up": up, "down": down}
        x = _layer(layer, norms[0] * jax.nn.standardize(x, axis=-1) + norms[1])
        x = norms[2] * jax.nn.standardize(x, axis=-1) + norms[3]
        for seed in seeds:
            keep = jax.random.bernoulli(jax.random.wrap_key_data(seed), 0.9, x.shape)
            x = jnp.where(keep, x / 0.9, 0)
            after.append(seed + jnp.array([0, 1], jnp.uint32))
        return x.mean(1) @ last + bias, after

    optimizer = optax.adam(1e-3)

    def make(wrap: Wrap) -> TrainStep:
        tx = wrap(optimizer)

        def train_step(state: Any, words: Any) -> tuple[Any, Any]:
            labels = words[:, 0] % 2

            def loss(variables: Any) -> Any:
                logits, seeds = forward(variables, state["seeds"], words)
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
                return losses.mean(), (seeds, logits)

            found = jax.value_and_grad(loss, has_aux=True)(state["params"])
            (value, (seeds, logits)), grads = found
            total = state["total"] + (logits.argmax(-1) == labels).astype(jnp.float32).sum()
            count = state["count"] + float(ROWS)
            new = {**updated(tx, state, grads), "seeds": seeds, "total": total, "count": count}
            return new, {"loss": value, "accuracy": total / count}

        return train_step

    more = {"seeds": seeds, "total": jnp.zeros(()), "count": jnp.zeros(())}
    return Program("keras style", make, started(optimizer, trainable, **more), words)
