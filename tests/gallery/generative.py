"""Generative models: diffusion, flows, adversaries, codes, radiance fields, posteriors."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tests.gallery.parts import Spread, averaged, net, started, updated
from tests.zoo import Built
from tests.zoo.base import Wrap
from tests.zoo.data import FEATURES, generator, labelled, regression
from tests.zoo.layers import init_matrix, init_mlp, mlp


def build_diffusion(wrap: Wrap) -> Built:
    """Builds DDPM: a random time and noise for each example, weights by time, an average."""
    tx = wrap(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))
    params = init_mlp(2, (FEATURES + 2, 16, FEATURES))
    kept = jnp.cumprod(1 - jnp.linspace(1e-4, 0.2, 20))

    def loss(params: Any, x: jax.Array, key: Any) -> jax.Array:
        of_time, of_noise = jax.random.split(key)
        t = jax.random.randint(of_time, x.shape[:1], 0, 20)
        noise = jax.random.normal(of_noise, x.shape)
        alpha = kept[t][:, None]
        noisy = jnp.sqrt(alpha) * x + jnp.sqrt(1 - alpha) * noise
        when = jnp.stack([jnp.sin(t / 5.0), jnp.cos(t / 5.0)], axis=1)
        found = mlp(params, jnp.concatenate([noisy, when], axis=1))
        weight = jnp.minimum(alpha[:, 0] / (1 - alpha[:, 0]), 5.0)
        return (weight * jnp.square(found - noise).mean(-1)).mean()

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        key, drawing = jax.random.split(state["key"])
        value, grads = jax.value_and_grad(loss)(state["params"], batch["x"], drawing)
        new = updated(tx, state, grads)
        decay = jnp.minimum(0.999, (1 + state["step"]) / (10 + state["step"]))
        ema = averaged(state["ema"], new["params"], 1 - decay)
        return {**new, "ema": ema, "key": key, "step": state["step"] + 1}, {"loss": value}

    more = {"ema": params, "key": jax.random.key(0), "step": jnp.zeros((), jnp.int32)}
    return Built(started(tx, params, **more), step, labelled)


def build_consistency(wrap: Wrap) -> Built:
    """Builds consistency training: two neighbouring times, whose number grows over the steps."""
    tx = wrap(optax.radam(1e-2))
    params = init_mlp(3, (FEATURES + 1, 16, FEATURES))

    def model(params: Any, x: jax.Array, t: jax.Array) -> jax.Array:
        keep = 0.25 / (jnp.square(t - 0.002) + 0.25)
        raw = mlp(params, jnp.concatenate([x / jnp.sqrt(jnp.square(t) + 0.25), jnp.log(t) / 4], 1))
        return keep * x + t * jax.lax.rsqrt(jnp.square(t) + 0.25) * raw

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        key = jax.random.fold_in(state["key"], state["step"])
        x = batch["x"]
        number = jnp.ceil(jnp.sqrt(state["step"] * 10.0 + 4.0))
        at = jnp.floor(jax.random.uniform(key, (x.shape[0], 1)) * (number - 1))
        edge = (0.002 ** (1 / 7), 10.0 ** (1 / 7))
        low = (edge[0] + at / (number - 1) * (edge[1] - edge[0])) ** 7
        high = (edge[0] + (at + 1) / (number - 1) * (edge[1] - edge[0])) ** 7
        noise = jax.random.normal(jax.random.fold_in(key, 1), x.shape)

        def loss(params: Any) -> jax.Array:
            target = jax.lax.stop_gradient(model(state["ema"], x + low * noise, low))
            apart = model(params, x + high * noise, high) - target
            return (jnp.sqrt(jnp.square(apart).sum(-1) + 1e-4) - 1e-2).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        new = updated(tx, state, grads)
        ema = averaged(state["ema"], new["params"], 1 - jnp.exp(jnp.log(0.9) * 2 / number))
        return {**new, "ema": ema, "step": state["step"] + 1}, {"loss": value}

    more = {"ema": params, "key": jax.random.key(1), "step": jnp.zeros((), jnp.int32)}
    return Built(started(tx, params, **more), step, labelled)


def build_flow(wrap: Wrap) -> Built:
    """Builds distrax's RealNVP: alternating affine couplings, the log-density by their sums."""
    tx = wrap(optax.adabelief(1e-2))
    half = FEATURES // 2
    params = [init_mlp(seed, (half, 8, FEATURES)) for seed in range(4)]

    def log_prob(params: Any, x: jax.Array) -> jax.Array:
        total = jnp.zeros(())
        for number, layer in enumerate(params):
            x = x[::-1] if number % 2 else x
            scale, shift = jnp.split(mlp(layer, x[:half]), 2)
            scale = jnp.tanh(scale)
            x = jnp.concatenate([x[:half], x[half:] * jnp.exp(scale) + shift])
            total = total + scale.sum()
        return total + jax.scipy.stats.norm.logpdf(x).sum()

    def update(params: Any, opt_state: Any, batch: Any, key: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            x = batch["x"] + 0.05 * jax.random.uniform(key, batch["x"].shape)
            return -jnp.mean(jax.vmap(log_prob, in_axes=(None, 0))(params, x))

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    state = (params, tx.init(params))
    return Spread(state, update, lambda n, r: (labelled(n, r), jax.random.key(n)))


def build_flow_matching(wrap: Wrap) -> Built:
    """Builds flow matching: noise and data paired by the order of one feature, straight paths."""
    tx = wrap(optax.nadamw(1e-2))
    params = init_mlp(6, (FEATURES + 1, 16, FEATURES))

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        key, *drawing = jax.random.split(state["key"], 3)
        x = batch["x"]
        t = jax.random.uniform(drawing[0], (x.shape[0], 1))
        noise = jax.random.normal(drawing[1], x.shape)

        def loss(params: Any) -> jax.Array:
            between = (1 - t) * noise + t * x
            speed = mlp(params, jnp.concatenate([between, t], axis=1))
            return jnp.square(speed - (x - noise)).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        return {**updated(tx, state, grads), "key": key}, {"loss": value}

    return Built(started(tx, params, key=jax.random.key(8)), step, labelled)


def build_adversaries(wrap: Wrap) -> Built:
    """Builds DCGAN: one step draws noise, trains the critic on both, then the generator."""
    critic_tx, maker_tx = (wrap(optax.adam(1e-2, b1=0.5)) for _ in range(2))
    critic, maker = init_mlp(1, (FEATURES, 8, 1)), init_mlp(2, (4, 8, FEATURES))

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        key, drawing = jax.random.split(state["key"])
        noise = jax.random.normal(drawing, (batch["x"].shape[0], 4))

        def critic_loss(critic: Any) -> jax.Array:
            made = mlp(critic, mlp(state["maker"]["params"], noise))
            real = mlp(critic, batch["x"])
            return (jax.nn.softplus(-real) + jax.nn.softplus(made)).mean()

        def maker_loss(maker: Any, critic: Any) -> jax.Array:
            return jax.nn.softplus(-mlp(critic, mlp(maker, noise))).mean()

        of_critic, grads = jax.value_and_grad(critic_loss)(state["critic"]["params"])
        critic = updated(critic_tx, state["critic"], grads)
        of_maker, grads = jax.value_and_grad(maker_loss)(state["maker"]["params"], critic["params"])
        maker = updated(maker_tx, state["maker"], grads)
        losses = {"critic": of_critic, "maker": of_maker}
        return {"critic": critic, "maker": maker, "key": key}, losses

    state = {"critic": started(critic_tx, critic), "maker": started(maker_tx, maker)}
    return Built({**state, "key": jax.random.key(2)}, step, labelled)


def build_gradient_penalty(wrap: Wrap) -> Built:
    """Builds WGAN-GP: the critic's gradient by each example has norm 1, several steps in a loop."""
    critic_tx, maker_tx = (wrap(optax.rmsprop(1e-3)) for _ in range(2))
    critic, maker = init_mlp(1, (FEATURES, 8, 1)), init_mlp(2, (4, 8, FEATURES))

    def critic_loss(critic: Any, real: jax.Array, made: jax.Array, weight: jax.Array) -> jax.Array:
        def score(x: jax.Array) -> jax.Array:
            return mlp(critic, x)[0]

        slopes = jax.vmap(jax.grad(score))(weight * real + (1 - weight) * made)
        norms = jnp.sqrt(jnp.square(slopes).sum(-1) + 1e-12)
        apart = jax.vmap(score)(made).mean() - jax.vmap(score)(real).mean()
        return apart + 10.0 * jnp.square(norms - 1).mean()

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        key, *drawing = jax.random.split(state["key"], 3)
        real = batch["x"]
        weight = jax.random.uniform(drawing[0], (real.shape[0], 1))
        noise = jax.random.normal(drawing[1], (real.shape[0], 4))
        critic = state["critic"]
        for _ in range(2):
            made = mlp(state["maker"]["params"], noise)
            value, grads = jax.value_and_grad(critic_loss)(critic["params"], real, made, weight)
            critic = updated(critic_tx, critic, grads)

        def maker_loss(maker: Any) -> jax.Array:
            return -mlp(critic["params"], mlp(maker, noise)).mean()

        maker = updated(maker_tx, state["maker"], jax.grad(maker_loss)(state["maker"]["params"]))
        return {"critic": critic, "maker": maker, "key": key}, {"critic": value}

    state = {"critic": started(critic_tx, critic), "maker": started(maker_tx, maker)}
    return Built({**state, "key": jax.random.key(3)}, step, labelled)


class Codes(NamedTuple):
    """Code vectors, as averages of the data assigned to each."""

    vectors: jax.Array
    counts: jax.Array
    sums: jax.Array


def build_codebook(wrap: Wrap) -> Built:
    """Builds haiku's VQ-VAE: codes by averages over batches, straight-through gradients."""
    tx = wrap(optax.adam(1e-2))
    vectors = init_matrix(3, 8, 4)
    params = {"in": init_mlp(1, (FEATURES, 8, 4)), "out": init_mlp(2, (4, 8, FEATURES))}

    def loss(params: Any, codes: Codes, x: jax.Array) -> tuple[jax.Array, Any]:
        z = mlp(params["in"], x)
        apart = jnp.square(z).sum(-1, keepdims=True) - 2 * z @ codes.vectors.T
        chosen = jnp.argmin(apart + jnp.square(codes.vectors).sum(-1), axis=-1)
        rounded = codes.vectors[chosen]
        commitment = jnp.square(z - jax.lax.stop_gradient(rounded)).mean()
        found = mlp(params["out"], z + jax.lax.stop_gradient(rounded - z))
        return jnp.square(found - x).mean() + 0.25 * commitment, (z, chosen)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        codes: Codes = state["codes"]
        value_and_grad = jax.value_and_grad(loss, has_aux=True)
        (value, (z, chosen)), grads = value_and_grad(state["params"], codes, batch["x"])
        picked = jax.nn.one_hot(chosen, 8)
        counts = 0.9 * codes.counts + 0.1 * picked.sum(axis=0)
        sums = 0.9 * codes.sums + 0.1 * picked.T @ z
        total = counts.sum()
        smooth = (counts + 1e-5) / (total + 8e-5) * total
        new = Codes(sums / smooth[:, None], counts, sums)
        used = picked.mean(axis=0)
        perplexity = jnp.exp(-(used * jnp.log(used + 1e-10)).sum())
        return {**updated(tx, state, grads), "codes": new}, {"loss": value, "used": perplexity}

    codes = Codes(vectors, jnp.ones(8), vectors)
    return Built(started(tx, params, codes=codes), step, labelled)


def rays(step: int, rows: int) -> Any:
    """Makes rays through a scene, each with its visible colour."""
    random = generator(41, step)
    names = {"origins": 3, "directions": 3, "colours": 3}
    return {name: random.uniform(-1, 1, (rows, n)).astype("float32") for name, n in names.items()}


def build_radiance(wrap: Wrap) -> Built:
    """Builds jaxnerf: random depths, coarse and fine fields, light summed along each ray."""
    tx = wrap(optax.adam(optax.exponential_decay(1e-2, 10, 0.5)))
    params = {"coarse": init_mlp(1, (27, 16, 4)), "fine": init_mlp(2, (27, 16, 4))}

    def coded(x: jax.Array) -> jax.Array:
        scaled = (x[..., None, :] * 2.0 ** jnp.arange(4)[:, None]).reshape(*x.shape[:-1], -1)
        return jnp.concatenate([x, jnp.sin(scaled), jnp.cos(scaled)], axis=-1)

    def rendered(field: Any, batch: Any, depths: jax.Array) -> tuple[jax.Array, jax.Array]:
        points = batch["origins"][:, None] + depths[..., None] * batch["directions"][:, None]
        raw = mlp(field, coded(points))
        gaps = jnp.diff(depths, axis=1, append=depths[:, -1:] + 1.0)
        alpha = 1 - jnp.exp(-jax.nn.softplus(raw[..., 3]) * gaps)
        through = jnp.cumprod(1 - alpha + 1e-10, axis=1)
        weights = alpha * jnp.concatenate([jnp.ones_like(alpha[:, :1]), through[:, :-1]], axis=1)
        return (weights[..., None] * jax.nn.sigmoid(raw[..., :3])).sum(1), weights

    def train_step(state: Any, batch: Any, rng: Any) -> Any:
        one, two = jax.random.split(rng)
        rows = batch["origins"].shape[0]
        edges = jnp.linspace(0.5, 3.0, 7)
        depths = edges[:-1] + jax.random.uniform(one, (rows, 6)) * (edges[1] - edges[0])

        def loss(params: Any) -> tuple[jax.Array, Any]:
            coarse, weights = rendered(params["coarse"], batch, depths)
            share = jnp.cumsum(jax.lax.stop_gradient(weights) + 1e-3, axis=1)
            share = share / share[:, -1:]
            u = jax.random.uniform(two, (rows, 4))
            finer = jax.vmap(jnp.interp)(u, share, depths)
            every = jnp.sort(jnp.concatenate([depths, finer], axis=1), axis=1)
            fine, _ = rendered(params["fine"], batch, every)
            squares = [jnp.square(c - batch["colours"]).mean() for c in (coarse, fine)]
            return squares[0] + squares[1], -10 * jnp.log10(squares[1])

        (value, psnr), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        return updated(tx, state, grads), {"loss": value, "psnr": psnr}

    state = (started(tx, params),)
    return Spread(state, train_step, lambda n, r: (rays(n, r), jax.random.PRNGKey(n)))


def build_posterior(wrap: Wrap) -> Built:
    """Builds numpyro's SVI: a guide of means and scales, samples by vmap, the data's full size."""
    tx = wrap(optax.chain(optax.clip(10.0), optax.adam(1e-2)))
    means = {"w": jnp.zeros(FEATURES), "b": jnp.zeros(()), "noise": jnp.zeros(())}
    guide = {"mean": means, "log_scale": jax.tree.map(lambda x: x - 2.0, means)}

    def elbo(guide: Any, key: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        leaves, tree = jax.tree.flatten(guide["mean"])
        keys = jax.tree.unflatten(tree, list(jax.random.split(key, len(leaves))))
        noise = jax.tree.map(lambda k, m: jax.random.normal(k, m.shape), keys, guide["mean"])
        z = jax.tree.map(
            lambda m, s, e: m + jnp.exp(s) * e, guide["mean"], guide["log_scale"], noise
        )
        fit = jax.scipy.stats.norm.logpdf(y, x @ z["w"] + z["b"], jnp.exp(z["noise"]))
        prior = sum(jax.scipy.stats.norm.logpdf(v).sum() for v in jax.tree.leaves(z))
        spread = sum(s.sum() for s in jax.tree.leaves(guide["log_scale"]))
        return fit.sum() * (1000 / x.shape[0]) + prior + spread

    def update(svi_state: Any, x: Any, y: Any) -> Any:
        key, drawing = jax.random.split(svi_state["key"])

        def loss(guide: Any) -> jax.Array:
            samples = jax.vmap(elbo, (None, 0, None, None))
            return -samples(guide, jax.random.split(drawing, 3), x, y).mean() / 1000

        value, grads = jax.value_and_grad(loss)(svi_state["params"])
        return {**updated(tx, svi_state, grads), "key": key}, value

    def batch(number: int, rows: int) -> Any:
        made = regression(number, rows)
        return made["x"], made["y"]

    return Spread((started(tx, guide, key=jax.random.key(0)),), update, batch)


def build_langevin(wrap: Wrap) -> Built:
    """Builds blackjax's SGLD with preconditioning: the optimizer itself draws noise."""
    noisy = optax.chain(optax.scale_by_rms(), optax.add_noise(0.01, 0.55, jax.random.key(3)))
    tx = wrap(optax.chain(noisy, optax.scale(-1e-2)))

    def log_density(position: Any, batch: Any) -> jax.Array:
        prior = -0.5 * sum(jnp.vdot(x, x) for x in jax.tree.leaves(position))
        fit = -jnp.square(mlp(position, batch["x"]).mean(-1) - batch["y"]).mean()
        return prior / 1000 + fit

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        value, grads = jax.value_and_grad(log_density)(state["params"], batch)
        grads = jax.tree.map(jnp.negative, grads)
        return updated(tx, state, grads), {"log_density": value}

    return Built(started(tx, net()), step, regression)


PROGRAMS: dict[str, Callable[[Wrap], Built]] = {
    "diffusion": build_diffusion,
    "consistency": build_consistency,
    "flow": build_flow,
    "flow_matching": build_flow_matching,
    "adversaries": build_adversaries,
    "gradient_penalty": build_gradient_penalty,
    "codebook": build_codebook,
    "radiance": build_radiance,
    "posterior": build_posterior,
    "langevin": build_langevin,
}
