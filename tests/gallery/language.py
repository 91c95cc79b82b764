"""Sequence models: decoders, recurrences, masked words, preferences, adapters, teachers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from tests.gallery.parts import Spread, started, updated
from tests.zoo import Built
from tests.zoo.base import Wrap
from tests.zoo.data import LENGTH, VOCABULARY, generator, sentences, signals
from tests.zoo.layers import init_matrix

WIDTH, HEADS, LAYERS = 8, 2, 2


def matrices(seed: int, **shapes: tuple[int, ...]) -> dict[str, jax.Array]:
    """Makes parameters by name; the second to last axis is the input."""
    made = {}
    for number, (name, shape) in enumerate(shapes.items()):
        rows = int(np.prod(shape[:-1]))
        scale = (rows / shape[-2]) ** 0.5 if len(shape) > 1 else 1.0
        made[name] = scale * init_matrix(seed + number, rows, shape[-1]).reshape(shape)
    return made


def decoder(seed: int = 3) -> dict[str, Any]:
    """Makes a decoder whose layers are stacked on their first axis."""
    square, wide = (LAYERS, WIDTH, WIDTH), (LAYERS, WIDTH, 2 * WIDTH)
    layers = matrices(
        seed, q=square, k=square, v=square, o=square, up=wide, down=(LAYERS, 2 * WIDTH, WIDTH)
    )
    layers |= {"norm": jnp.ones((LAYERS, WIDTH))}
    return {"layers": layers, "embed": matrices(seed + 9, words=(VOCABULARY, WIDTH))["words"]}


def rms_norm(scale: Any, x: jax.Array) -> jax.Array:
    return scale * x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def rotated(x: jax.Array) -> jax.Array:
    """Applies rotary positions to `[batch, time, heads, channels]`."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] / 100.0 ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def layer(x: jax.Array, p: Any, *, causal: bool = True) -> jax.Array:
    """Applies one layer of a decoder: attention with rotary positions, then a gated net."""
    h = rms_norm(p["norm"], x)
    q, k, v = (jnp.reshape(h @ p[name], (*h.shape[:2], HEADS, -1)) for name in "qkv")
    scores = jnp.einsum("bthc,bshc->bhts", rotated(q), rotated(k)) / q.shape[-1] ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    mixed = jnp.einsum("bhts,bshc->bthc", jax.nn.softmax(scores), v).reshape(h.shape)
    x = x + mixed @ p["o"]
    return x + jax.nn.silu(rms_norm(p["norm"], x) @ p["up"]) @ p["down"]


def logits(params: Any, tokens: jax.Array, *, causal: bool = True) -> jax.Array:
    """Returns scores of words at every position, the layers in a scan with recomputation."""

    @jax.checkpoint
    def once(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return layer(x, p, causal=causal), None

    x, _ = jax.lax.scan(once, params["embed"][tokens], params["layers"])
    return x @ params["embed"].T


def next_word_loss(params: Any, batch: Any) -> jax.Array:
    """Returns the mean loss over unmasked words."""
    scores = logits(params, batch["tokens"][:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["tokens"][:, 1:])
    counts = batch["mask"][:, 1:]
    return (losses * counts).sum() / counts.sum()


def build_decoder(wrap: Wrap) -> Built:
    """Builds MaxText's step: a TrainState, scanned layers, z-loss, total weights as an aux."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 20)
    adamw = optax.adamw(schedule, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
    tx = wrap(optax.chain(optax.clip_by_global_norm(1.0), adamw))

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        scores = logits(params, batch["tokens"][:, :-1])
        wanted = jax.nn.one_hot(batch["tokens"][:, 1:], VOCABULARY)
        total = jax.nn.logsumexp(scores, axis=-1)
        each = total - (scores * wanted).sum(-1) + 1e-3 * jnp.square(total)
        weights = batch["mask"][:, 1:].astype(jnp.float32)
        return (each * weights).sum() / (weights.sum() + 1e-8), {"weights": weights.sum()}

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(state.params, batch)
        new = state.apply_gradients(grads=grads)
        norms = {"grads": optax.tree.norm(grads), "params": optax.tree.norm(new.params)}
        return new, {"loss": value, **aux, **norms}

    state = TrainState.create(apply_fn=logits, params=decoder(), tx=tx)
    return Built(state, step, sentences)


def build_microbatches(wrap: Wrap) -> Built:
    """Builds levanter's accumulation: gradients of slices, summed in a scan, then one update."""
    tx = wrap(optax.adamw(1e-2))

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        def add(total: Any, part: Any) -> tuple[Any, jax.Array]:
            value, grads = jax.value_and_grad(mean_word_loss)(state["params"], part)
            return jax.tree.map(jnp.add, total, grads), value

        parts = jax.tree.map(lambda x: x.reshape(4, x.shape[0] // 4, *x.shape[1:]), batch)
        zeros = jax.tree.map(jnp.zeros_like, state["params"])
        grads, values = jax.lax.scan(add, zeros, parts)
        grads = jax.tree.map(lambda g: g / 4, grads)
        return updated(tx, state, grads), {"loss": values.mean()}

    return Built(started(tx, decoder()), step, sentences)


def mean_word_loss(params: Any, batch: Any) -> jax.Array:
    scores = logits(params, batch["tokens"][:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, batch["tokens"][:, 1:])
    return losses.mean()


def build_masked_words(wrap: Wrap) -> Built:
    """Builds t5x-like pretraining as in BERT: words are masked by a key folded with the step."""
    tx = wrap(optax.adafactor(1e-2, min_dim_size_to_factor=4))

    def loss(params: Any, batch: Any, key: Any) -> jax.Array:
        tokens = batch["tokens"]
        hidden = jax.random.bernoulli(key, 0.3, tokens.shape) & batch["mask"]
        scores = logits(params, jnp.where(hidden, VOCABULARY - 1, tokens), causal=False)
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, tokens)
        return (losses * hidden).sum() / jnp.maximum(hidden.sum(), 1)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        key = jax.random.fold_in(state["key"], state["step"])
        value, grads = jax.value_and_grad(loss)(state["params"], batch, key)
        return {**updated(tx, state, grads), "step": state["step"] + 1}, {"loss": value}

    state = started(tx, decoder(), key=jax.random.key(5), step=jnp.zeros((), jnp.int32))
    return Built(state, step, sentences)


def build_adapters(wrap: Wrap) -> Built:
    """Builds LoRA: low-rank parts are trained, their base is an argument."""
    tx = wrap(optax.adamw(1e-2))
    base = decoder()

    def merged(adapters: Any, base: Any) -> Any:
        layers = dict(base["layers"])
        for name, (a, b) in adapters.items():
            layers[name] = layers[name] + 0.5 * jnp.einsum("lir,lro->lio", a, b)
        return {**base, "layers": layers}

    def train_step(lora: Any, opt_state: Any, base: Any, batch: Any) -> Any:
        def loss(lora: Any) -> jax.Array:
            return next_word_loss(merged(lora, base), batch)

        value, grads = jax.value_and_grad(loss)(lora)
        updates, opt_state = tx.update(grads, opt_state, lora)
        return optax.apply_updates(lora, updates), opt_state, value

    def pair(seed: int) -> tuple[jax.Array, jax.Array]:
        a = matrices(seed, a=(LAYERS, WIDTH, 2))["a"]
        return a, jnp.zeros((LAYERS, 2, WIDTH))

    lora = {"q": pair(1), "v": pair(2)}
    return Spread((lora, tx.init(lora)), train_step, lambda n, r: (base, sentences(n, r)))


def build_frozen_base(wrap: Wrap) -> Built:
    """Builds fine-tuning of all norms only, by labels (`multi_transform`)."""

    def labels(params: Any) -> Any:
        def of(path: Any, _: Any) -> str:
            return "train" if "norm" in jax.tree_util.keystr(path) else "freeze"

        return jax.tree_util.tree_map_with_path(of, params)

    rules: dict[Any, Any] = {"train": optax.adam(1e-2), "freeze": optax.set_to_zero()}
    tx = wrap(optax.multi_transform(rules, labels))

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(next_word_loss)(state["params"], batch)
        return updated(tx, state, grads), {"loss": value}

    return Built(started(tx, decoder()), step, sentences)


def pairs(step: int, rows: int) -> dict[str, Any]:
    """Makes preferred and rejected answers."""
    chosen, rejected = sentences(step, rows), sentences(step + 100, rows)
    return {"chosen": chosen["tokens"], "rejected": rejected["tokens"], "mask": chosen["mask"]}


def of_sequence(params: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    log_p = jax.nn.log_softmax(logits(params, tokens[:, :-1]))
    each = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
    return (each * mask[:, 1:]).sum(axis=1)


def build_preferences(wrap: Wrap) -> Built:
    """Builds DPO, as in EasyDeL and trl: a policy against a fixed reference."""
    tx = wrap(optax.chain(optax.clip_by_global_norm(1.0), optax.rmsprop(1e-3)))

    def loss(policy: Any, reference: Any, batch: Any) -> tuple[jax.Array, Any]:
        def margin(name: str) -> jax.Array:
            ours = of_sequence(policy, batch[name], batch["mask"])
            return ours - jax.lax.stop_gradient(of_sequence(reference, batch[name], batch["mask"]))

        chosen, rejected = 0.1 * margin("chosen"), 0.1 * margin("rejected")
        value = -jax.nn.log_sigmoid(chosen - rejected).mean()
        return value, {"accuracy": (chosen > rejected).mean(), "margins": chosen - rejected}

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value_and_grad = jax.value_and_grad(loss, has_aux=True)
        (value, aux), grads = value_and_grad(state["params"], state["reference"], batch)
        return updated(tx, state, grads), {"loss": value, **aux}

    return Built(started(tx, decoder(), reference=decoder(4)), step, pairs)


def groups_of_answers(step: int, rows: int) -> dict[str, Any]:
    """Makes groups of four answers to one question, with rewards."""
    reward = generator(31, step).standard_normal(rows).astype(np.float32)
    return {**sentences(step, rows), "reward": reward}


def build_group_policy(wrap: Wrap) -> Built:
    """Builds GRPO: advantages within groups of answers, clipped ratios, a penalty."""
    tx = wrap(optax.adamw(1e-2))

    def loss(params: Any, old: Any, batch: Any) -> jax.Array:
        reward = batch["reward"].reshape(-1, 4)
        centred = reward - reward.mean(axis=1, keepdims=True)
        advantage = (centred / (reward.std(axis=1, keepdims=True) + 1e-4)).reshape(-1)
        new_p = of_sequence(params, batch["tokens"], batch["mask"])
        old_p = jax.lax.stop_gradient(of_sequence(old, batch["tokens"], batch["mask"]))
        ratio = jnp.exp(new_p - old_p)
        clipped = jnp.clip(ratio, 0.8, 1.2)
        penalty = jnp.exp(old_p - new_p) - (old_p - new_p) - 1
        return (0.04 * penalty - jnp.minimum(ratio * advantage, clipped * advantage)).mean()

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], state["old"], batch)
        return updated(tx, state, grads), {"loss": value}

    return Built(started(tx, decoder(), old=decoder()), step, groups_of_answers)


def build_distillation(wrap: Wrap) -> Built:
    """Builds DistilBERT's losses: soft targets of a teacher, words, and cosine similarity."""
    tx = wrap(optax.lion(1e-3))
    teacher = decoder(8)

    def train_step(params: Any, opt_state: Any, teacher: Any, batch: Any, key: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            keep = jax.random.bernoulli(key, 0.9, batch["tokens"].shape)
            ours = logits(params, batch["tokens"] * keep)
            soft = jax.nn.softmax(logits(teacher, batch["tokens"]) / 2.0)
            cross = -(soft * jax.nn.log_softmax(ours / 2.0)).sum(-1)
            alike = optax.cosine_similarity(ours, soft, epsilon=1e-6)
            return 4.0 * cross.mean() - alike.mean() + next_word_loss(params, batch)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return value, optax.apply_updates(params, updates), opt_state

    def batch(number: int, rows: int) -> Any:
        return teacher, sentences(number, rows), jax.random.PRNGKey(number)

    params = decoder(3)
    return Spread((params, tx.init(params)), train_step, batch, before=1)


def build_time_mixing(wrap: Wrap) -> Built:
    """Builds RWKV: words are mixed by a recurrence with a decay per channel, in a scan."""
    tx = wrap(optax.adamw(1e-2, b2=0.99))
    square = (WIDTH, WIDTH)
    params: dict[str, Any] = matrices(5, r=square, k=square, v=square, o=square)
    params |= {"decay": jnp.linspace(-1.0, 1.0, WIDTH), "bonus": jnp.full(WIDTH, 0.3)}
    params |= {"mix": jnp.full(WIDTH, 0.5), "embed": matrices(6, w=(VOCABULARY, WIDTH))["w"]}

    def mixed(p: Any, x: jax.Array) -> jax.Array:
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        x = x * p["mix"] + before * (1 - p["mix"])
        r, k, v = jax.nn.sigmoid(x @ p["r"]), x @ p["k"], x @ p["v"]

        def once(carry: Any, now: Any) -> Any:
            top, bottom = carry
            k, v = now
            here = jnp.exp(p["bonus"] + k)
            found = (top + here * v) / (bottom + here)
            decay = jnp.exp(-jnp.exp(p["decay"]))
            return (decay * top + jnp.exp(k) * v, decay * bottom + jnp.exp(k)), found

        start = (jnp.zeros_like(x[:, 0]), jnp.full_like(x[:, 0], 1e-6))
        _, found = jax.lax.scan(once, start, (k.swapaxes(0, 1), v.swapaxes(0, 1)))
        return (r * found.swapaxes(0, 1)) @ p["o"]

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"][batch["tokens"][:, :-1]]
        scores = (x + mixed(params, x)) @ params["embed"].T
        wanted = batch["tokens"][:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(scores, wanted).mean()

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return updated(tx, state, grads), {"loss": value}

    return Built(started(tx, params), step, sentences)


def build_state_space(wrap: Wrap) -> Built:
    """Builds S5: a complex recurrence by an associative scan, and slower rates for its matrix."""

    def labels(params: Any) -> Any:
        return {name: "slow" if name in {"re", "im", "dt"} else "usual" for name in params}

    rules: dict[Any, Any] = {
        "slow": optax.adam(1e-3),
        "usual": optax.adamw(1e-2, weight_decay=0.05),
    }
    tx = wrap(optax.multi_transform(rules, labels))
    params: dict[str, Any] = matrices(2, b=(3, 2 * WIDTH), c=(2 * WIDTH, WIDTH), out=(WIDTH, 2))
    params |= {"re": jnp.full(WIDTH, -0.5), "im": jnp.arange(WIDTH) * 0.5, "dt": jnp.zeros(WIDTH)}

    def scores(p: Any, x: jax.Array) -> jax.Array:
        poles = jax.lax.complex(-jnp.exp(p["re"]), p["im"])
        decay = jnp.exp(poles * jnp.exp(p["dt"]))
        drive = x @ p["b"]
        drive = jax.lax.complex(drive[:, :WIDTH], drive[:, WIDTH:])

        def joined(a: Any, b: Any) -> Any:
            return a[0] * b[0], b[0] * a[1] + b[1]

        decays = jnp.broadcast_to(decay, drive.shape)
        _, states = jax.lax.associative_scan(joined, (decays, drive))
        pair = jnp.concatenate([states.real, states.imag], axis=-1)
        return jax.nn.gelu(pair @ p["c"]).mean(axis=0) @ p["out"]

    def loss(params: Any, batch: Any) -> jax.Array:
        found = jax.vmap(scores, in_axes=(None, 0))(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(found, batch["y"]).mean()

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return updated(tx, state, grads), {"loss": value}

    return Built(started(tx, params), step, signals)


def build_selective_scan(wrap: Wrap) -> Built:
    """Builds Mamba: a state's decay depends on the word, in a scan over chunks of time."""
    tx = wrap(optax.adamw(1e-2))
    params: dict[str, Any] = matrices(12, b=(WIDTH, 4), c=(WIDTH, 4), dt=(WIDTH, WIDTH))
    params |= {"a": jnp.log(jnp.tile(jnp.arange(1.0, 5.0), (WIDTH, 1))), "d": jnp.ones(WIDTH)}
    params |= {"embed": matrices(6, w=(VOCABULARY, WIDTH))["w"]}

    def selected(p: Any, x: jax.Array) -> jax.Array:
        dt = jax.nn.softplus(x @ p["dt"])
        decay = jnp.exp(-dt[..., None] * jnp.exp(p["a"]))
        drive = (dt * x)[..., None] * (x @ p["b"])[..., None, :]

        def once(h: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
            decay, drive, c = now
            h = decay * h + drive
            return h, jnp.einsum("bwn,bn->bw", h, c)

        by_time = jax.tree.map(lambda z: jnp.moveaxis(z, 1, 0), (decay, drive, x @ p["c"]))
        start = jnp.zeros((x.shape[0], WIDTH, 4))
        _, found = jax.lax.scan(jax.checkpoint(once), start, by_time)
        return jnp.moveaxis(found, 0, 1) + p["d"] * x

    def loss(params: Any, batch: Any) -> jax.Array:
        x = params["embed"][batch["tokens"][:, :-1]]
        scores = selected(params, x) @ params["embed"].T
        wanted = batch["tokens"][:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, wanted)
        return jnp.mean(losses, where=batch["mask"][:, 1:])

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return updated(tx, state, grads), {"loss": value}

    return Built(started(tx, params), step, sentences)


class Words(NamedTuple):
    """State of word2vec: vectors of words and of contexts, and a key."""

    vectors: jax.Array
    around: jax.Array
    key: Any


def build_word_vectors(wrap: Wrap) -> Built:
    """Builds word2vec: each pair of words against random ones, by plain SGD."""
    tx = wrap(optax.sgd(0.5))

    def loss(tables: Any, batch: Any, drawn: jax.Array) -> jax.Array:
        centre = tables[0][batch["tokens"][:, 0]]
        near, far = tables[1][batch["tokens"][:, 1]], tables[1][drawn]
        good = jax.nn.log_sigmoid((centre * near).sum(-1))
        bad = jax.nn.log_sigmoid(-jnp.einsum("bw,bnw->bn", centre, far)).sum(-1)
        return -(good + bad).mean()

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        words, opt = state
        key, drawing = jax.random.split(words.key)
        shape = (batch["tokens"].shape[0], 3)
        drawn = jax.random.randint(drawing, shape, 0, VOCABULARY)
        value, grads = jax.value_and_grad(loss)(words[:2], batch, drawn)
        updates, opt = tx.update(grads, opt, words[:2])
        new: Any = optax.apply_updates(words[:2], updates)
        return (Words(new[0], new[1], key), opt), {"loss": value}

    one, two = (matrices(seed, w=(VOCABULARY, WIDTH))["w"] for seed in (1, 2))
    return Built((Words(one, two, jax.random.key(3)), tx.init((one, two))), step, sentences)


def build_decisions(wrap: Wrap) -> Built:
    """Builds a decision transformer: interleaved returns, states and actions as one sequence."""
    tx = wrap(optax.chain(optax.clip_by_global_norm(0.25), optax.adamw(1e-2, weight_decay=1e-4)))
    params = {**decoder(), **matrices(21, state=(3, WIDTH), to_go=(1, WIDTH), act=(WIDTH, 3))}

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        to_go = jnp.flip(jnp.cumsum(jnp.flip(x.sum(-1), 1), axis=1), 1)[..., None]
        tokens = jnp.stack([to_go @ params["to_go"], x @ params["state"]], axis=2)
        h = tokens.reshape(x.shape[0], 2 * LENGTH, WIDTH)
        for number in range(LAYERS):
            h = layer(h, jax.tree.map(lambda p, n=number: p[n], params["layers"]))
        act = jnp.tanh(h.reshape(x.shape[0], LENGTH, 2, WIDTH)[:, :, 1] @ params["act"])
        return jnp.square(act - jnp.roll(x, -1, axis=1)).mean()

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return updated(tx, state, grads), {"loss": value}

    params.pop("embed")
    return Built(started(tx, params), step, signals)


PROGRAMS: dict[str, Callable[[Wrap], Built]] = {
    "decoder": build_decoder,
    "microbatches": build_microbatches,
    "masked_words": build_masked_words,
    "adapters": build_adapters,
    "frozen_base": build_frozen_base,
    "preferences": build_preferences,
    "group_policy": build_group_policy,
    "distillation": build_distillation,
    "time_mixing": build_time_mixing,
    "state_space": build_state_space,
    "selective_scan": build_selective_scan,
    "word_vectors": build_word_vectors,
    "decisions": build_decisions,
}
