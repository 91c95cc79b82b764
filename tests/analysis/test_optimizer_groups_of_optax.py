"""Optimize groups of Optax: separable, sliceable, and exact when sliced."""

from typing import Any

import jax
import optax
import pytest

from jaxfleet.analysis.optimizer_groups import RowLocality
from jaxfleet.ir import parse, verify
from tests.analysis.groups_steps import check_slices, groups_of

CONTRIB: Any = optax.contrib  # mypy does not see its names
LOCAL, REDUCING, WHOLE = RowLocality.LOCAL, RowLocality.REDUCING, RowLocality.WHOLE
SCHEDULE = optax.warmup_cosine_decay_schedule(1e-3, 1e-1, warmup_steps=4, decay_steps=20)


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def frozen_bias() -> optax.GradientTransformation:
    labels = {"b": "frozen", "w": "trained"}
    return optax.multi_transform(
        {"trained": optax.adam(0.1), "frozen": optax.set_to_zero()}, labels
    )


LOCAL_OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "sgd_schedule": optax.sgd(SCHEDULE, momentum=0.9),
    "adam": optax.adam(0.1),
    "nadam": optax.nadam(0.1),
    "adamw_masked": optax.adamw(0.1, weight_decay=0.1, mask=matrices),
    "adamw_schedule": optax.adamw(SCHEDULE),
    "adagrad": optax.adagrad(0.1),
    "adadelta": optax.adadelta(0.1),
    "rmsprop": optax.rmsprop(0.1, centered=True, momentum=0.9),
    "rprop": optax.rprop(0.1),
    "lion": optax.lion(0.1),
    "radam": optax.radam(0.1),
    "adabelief": optax.adabelief(0.1),
    "amsgrad": optax.amsgrad(0.1),
    "adamax": optax.adamax(0.1),
    "yogi": optax.yogi(0.1),
    "sign_sgd": optax.sign_sgd(0.1),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE),
    "value_clip": optax.chain(optax.clip(0.5), optax.adam(0.1)),
    "masked": optax.chain(optax.masked(optax.trace(0.9), matrices), optax.sgd(0.1)),
    "frozen": frozen_bias(),
    "ema": optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "keep_params_nonnegative": optax.chain(optax.sgd(0.1), optax.keep_params_nonnegative()),
    "multisteps": optax.MultiSteps(optax.adam(0.1), 3).gradient_transformation(),
    "schedule_free": CONTRIB.schedule_free_sgd(0.1),
}

# For each: whether parameters interact, and the constraints of the matrix's and vector's rows.
OTHER_OPTIMIZERS: dict[str, tuple[optax.GradientTransformation, bool, RowLocality, RowLocality]] = {
    "lamb": (optax.lamb(0.1), False, REDUCING, REDUCING),
    "lars": (optax.lars(0.1), False, REDUCING, REDUCING),
    "novograd": (optax.novograd(0.1), False, REDUCING, REDUCING),
    "fromage": (optax.fromage(0.1), False, REDUCING, REDUCING),
    "adaptive_grad_clip": (optax.adaptive_grad_clip(0.1), False, REDUCING, REDUCING),
    "clip_by_block_rms": (optax.clip_by_block_rms(0.1), False, REDUCING, REDUCING),
    "zero_nans": (optax.chain(optax.zero_nans(), optax.adam(0.1)), False, REDUCING, REDUCING),
    "centralize": (optax.chain(optax.centralize(), optax.adam(0.1)), False, LOCAL, LOCAL),
    "adafactor": (
        optax.adafactor(0.1, min_dim_size_to_factor=2), False, WHOLE, REDUCING,
    ),
    "sm3": (optax.sm3(0.1), False, WHOLE, LOCAL),
    "muon": (CONTRIB.muon(0.1), False, WHOLE, LOCAL),
    "add_noise": (
        optax.chain(optax.sgd(0.1), optax.add_noise(0.1, 0.1, 0)), False, WHOLE, WHOLE,
    ),
    "clip_by_global_norm": (
        optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)), True, REDUCING, REDUCING,
    ),
    "multisteps_of_clipping": (
        optax.MultiSteps(
            optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)), 2
        ).gradient_transformation(),
        True, REDUCING, REDUCING,
    ),
    "apply_if_finite": (optax.apply_if_finite(optax.adam(0.1), 3), True, REDUCING, REDUCING),
    "multisteps_unless_not_finite": (
        optax.MultiSteps(
            optax.adam(0.1), 3, should_skip_update_fn=optax.skip_not_finite
        ).gradient_transformation(),
        True, REDUCING, REDUCING,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOCAL_OPTIMIZERS)
def test_an_elementwise_optimizer_is_separable_and_row_local(name: str) -> None:
    groups = groups_of(LOCAL_OPTIMIZERS[name])
    assert [group.name for group in groups.groups] == ["params/b", "params/w"]
    for group in groups.groups:
        assert group.is_separable, str(groups)
        assert group.rows is LOCAL, str(groups)
    assert not groups.crossing_ops


@pytest.mark.parametrize("name", OTHER_OPTIMIZERS)
def test_another_optimizer_gets_the_verdict_that_its_operators_give(name: str) -> None:
    optimizer, crosses, matrix, vector = OTHER_OPTIMIZERS[name]
    groups = groups_of(optimizer)
    w, b = groups.group("params/w"), groups.group("params/b")
    assert (w.rows, b.rows) == (matrix, vector), str(groups)
    assert (w.is_separable, b.is_separable) == (not crosses, not crosses), str(groups)
    assert bool(groups.crossing_ops) == crosses
    for group in (w, b):
        assert (group.reason is None) == (group.rows is LOCAL)
        assert group.others == (({"params/b": "params/w"}.get(group.name, "params/b"),) * crosses)
        verify(group.program)
        assert parse(str(group.program)) == group.program


@pytest.mark.few(5)
@pytest.mark.parametrize("name", LOCAL_OPTIMIZERS)
def test_a_row_local_group_gives_on_slices_what_it_gives_on_the_whole(name: str) -> None:
    for group in groups_of(LOCAL_OPTIMIZERS[name]).groups:
        check_slices(group)


def test_norms_within_rows_are_exact_on_slices_too() -> None:
    optimizer, _, _, _ = OTHER_OPTIMIZERS["centralize"]
    for group in groups_of(optimizer).groups:
        check_slices(group)
