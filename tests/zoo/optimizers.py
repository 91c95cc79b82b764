"""Optax beyond one optimizer: chains, masks, schedules, hyperparameters, accumulation."""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import optax

from tests.zoo.base import Built, Wrap, case, plain_program
from tests.zoo.data import CLASSES, FEATURES, labelled
from tests.zoo.layers import init_mlp, mlp, row_losses

CONTRIB: Any = optax.contrib  # mypy does not see its names


def mlp_program(tx: optax.GradientTransformation) -> Built:
    """Builds the same small net around any optimizer."""

    def loss(params: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        return row_losses(mlp(params, batch["x"]), batch["y"]).mean(), {}

    return plain_program(tx, init_mlp(4, (FEATURES, 16, CLASSES)), loss, labelled)


def matrices(params: Any) -> Any:
    """Selects the parameters with weight decay: matrices, not biases."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def build_clipping(wrap: Wrap) -> Built:
    """Builds clipping by the global norm, then AdamW with a mask."""
    adamw = optax.adamw(1e-2, weight_decay=0.1, mask=matrices)
    return mlp_program(wrap(optax.chain(optax.clip_by_global_norm(0.5), adamw)))


def build_clipping_outside(wrap: Wrap) -> Built:
    """Builds the same chain with only its last part wrapped."""
    return mlp_program(optax.chain(optax.clip_by_global_norm(0.5), wrap(optax.adam(1e-2))))


def build_schedule(wrap: Wrap) -> Built:
    """Builds a warm-up and cosine schedule as an injected hyperparameter."""
    schedule = optax.warmup_cosine_decay_schedule(1e-3, 3e-2, warmup_steps=4, decay_steps=20)
    return mlp_program(wrap(optax.inject_hyperparams(optax.adamw)(learning_rate=schedule)))


def build_multisteps(wrap: Wrap) -> Built:
    """Builds an update every four steps, on the mean of their gradients."""
    multi = optax.MultiSteps(optax.adam(1e-2), every_k_schedule=4)
    return mlp_program(wrap(multi.gradient_transformation()))


def build_multisteps_outside(wrap: Wrap) -> Built:
    """Builds the same with the wrapped optimizer inside, so that it runs under a branch."""
    multi = optax.MultiSteps(wrap(optax.adam(1e-2)), every_k_schedule=4)
    return mlp_program(multi.gradient_transformation())


def build_freeze(wrap: Wrap) -> Built:
    """Builds one optimizer for the first layer and none for the rest (`multi_transform`)."""

    def labels(params: Any) -> Any:
        return {name: "train" if name == "fc0" else "freeze" for name in params}

    momentum = optax.sgd(0.1, momentum=0.9, nesterov=True)
    parts: dict[Hashable, optax.GradientTransformation]
    parts = {"train": momentum, "freeze": optax.set_to_zero()}
    return mlp_program(wrap(optax.multi_transform(parts, labels)))


def around(tx: optax.GradientTransformation) -> Callable[[Wrap], Built]:
    """Returns a builder of the net around one optimizer."""
    return lambda wrap: mlp_program(wrap(tx))


CASES = (
    case("clipping", build_clipping, "core"),
    case("clipping_outside", build_clipping_outside, "marker_inside"),
    case("schedule", build_schedule, "core"),
    case("injected_rate", around(optax.inject_hyperparams(optax.adam)(learning_rate=1e-2))),
    case("multisteps", build_multisteps, "core"),
    case("multisteps_outside", build_multisteps_outside, "marker_inside"),
    case("freeze", build_freeze),
    # Norms over a whole parameter: layer-wise, factored, orthogonal.
    case("lamb", around(optax.lamb(1e-2))),
    case("lars", around(optax.lars(0.1))),
    case("adafactor", around(optax.adafactor(1e-2, min_dim_size_to_factor=2))),
    case("muon", around(CONTRIB.muon(1e-2))),
)
