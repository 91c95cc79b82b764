"""Every optimizer with its options matches fluid 1.8.5's kernels, to 1e-6 over ten steps.

The gradient of `sum(w * x)` is `x`, so the gradients are given. All cases train in one program,
each with its own parameter; `conformance/optimizer_cases.json` has 1.8.5's results of the same
cases, which validate the kernels in numpy.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid import layers
from jaxfleet.fluid.clip import (
    GradientClipByGlobalNorm,
    GradientClipByNorm,
    GradientClipByValue,
)
from jaxfleet.fluid.regularizer import L1Decay, L2Decay
from jaxfleet.runtime import Scope
from tests.fluid import optimizer_kernels as kernels
from tests.fluid.nets import fresh
from tests.fluid.optimizer_kernels import Kernel
from tests.fluid.recorded import cases

STEPS = 10
SHAPE = [4, 3]
ROWS = [6, 3]
O = fluid.optimizer  # noqa: E741  # used 60 times in a table


def _rmsprop(**options: Any) -> tuple[Callable[[], Any], Kernel]:
    return lambda: O.RMSProp(0.01, **options), kernels.rmsprop(0.01, **options)


DENSE: dict[str, tuple[Callable[[], Any], Kernel]] = {
    "sgd": (lambda: O.SGD(0.1), kernels.sgd(0.1)),
    "sgd_l1": (
        lambda: O.SGD(0.1, regularization=L1Decay(0.05)),
        kernels.with_l1(0.05, kernels.sgd(0.1)),
    ),
    "sgd_l2": (
        lambda: O.SGD(0.1, regularization=L2Decay(0.05)),
        kernels.with_l2(0.05, kernels.sgd(0.1)),
    ),
    "sgd_clip_v": (
        lambda: O.SGD(0.1, grad_clip=GradientClipByValue(0.5)),
        kernels.clipped(-0.5, 0.5, kernels.sgd(0.1)),
    ),
    "sgd_clip_v2": (
        lambda: O.SGD(0.1, grad_clip=GradientClipByValue(0.5, -0.25)),
        kernels.clipped(-0.25, 0.5, kernels.sgd(0.1)),
    ),
    "sgd_clip_n": (
        lambda: O.SGD(0.1, grad_clip=GradientClipByNorm(0.5)),
        kernels.clipped_by_norm(0.5, kernels.sgd(0.1)),
    ),
    "sgd_clip_g": (
        lambda: O.SGD(0.1, grad_clip=GradientClipByGlobalNorm(0.5)),
        kernels.clipped_by_norm(0.5, kernels.sgd(0.1)),
    ),
    "sgd_clip_g_l2": (
        lambda: O.SGD(0.1, regularization=L2Decay(0.05), grad_clip=GradientClipByGlobalNorm(0.5)),
        kernels.clipped_by_norm(0.5, kernels.with_l2(0.05, kernels.sgd(0.1))),
    ),
    "mom": (lambda: O.Momentum(0.1, 0.9), kernels.momentum(0.1, 0.9)),
    "mom_nest": (
        lambda: O.Momentum(0.1, 0.9, use_nesterov=True),
        kernels.momentum(0.1, 0.9, nesterov=True),
    ),
    "mom_l2": (
        lambda: O.Momentum(0.1, 0.9, regularization=L2Decay(0.05)),
        kernels.with_l2(0.05, kernels.momentum(0.1, 0.9)),
    ),
    "mom_nest_l2": (
        lambda: O.Momentum(0.1, 0.9, use_nesterov=True, regularization=L2Decay(0.05)),
        kernels.with_l2(0.05, kernels.momentum(0.1, 0.9, nesterov=True)),
    ),
    "lars": (lambda: O.LarsMomentum(0.1, 0.9), kernels.lars(0.1, 0.9)),
    "lars2": (
        lambda: O.LarsMomentum(0.1, 0.9, lars_coeff=0.5, lars_weight_decay=0.1),
        kernels.lars(0.1, 0.9, 0.5, 0.1),
    ),
    "lars0": (
        lambda: O.LarsMomentum(0.1, 0.9, lars_coeff=0.5, lars_weight_decay=0.0),
        kernels.lars(0.1, 0.9, 0.5, 0.0),
    ),
    "adagrad": (lambda: O.Adagrad(0.1), kernels.adagrad(0.1)),
    "adagrad2": (
        lambda: O.Adagrad(0.1, epsilon=0.1, initial_accumulator_value=0.3),
        kernels.adagrad(0.1, 0.1, 0.3),
    ),
    "dadagrad": (lambda: O.DecayedAdagrad(0.1), kernels.decayed_adagrad(0.1)),
    "dadagrad2": (
        lambda: O.DecayedAdagrad(0.1, decay=0.5, epsilon=0.1),
        kernels.decayed_adagrad(0.1, 0.5, 0.1),
    ),
    "adam": (lambda: O.Adam(0.1), kernels.adam(0.1)),
    "adam2": (
        lambda: O.Adam(0.1, beta1=0.5, beta2=0.7, epsilon=0.1),
        kernels.adam(0.1, 0.5, 0.7, 0.1),
    ),
    "adam_lazy": (lambda: O.Adam(0.1, lazy_mode=True), kernels.adam(0.1)),
    "adam_betas_are_variables": (
        lambda: O.Adam(0.1, beta1=_variable(0.5), beta2=_variable(0.7)),
        kernels.adam(0.1, 0.5, 0.7, powers=(0.9, 0.999)),
    ),
    "adamax": (lambda: O.Adamax(0.1), kernels.adamax(0.1)),
    "adamax2": (
        lambda: O.Adamax(0.1, beta1=0.5, beta2=0.7, epsilon=0.1),
        kernels.adamax(0.1, 0.5, 0.7, 0.1),
    ),
    "rms_0_0": _rmsprop(),
    "rms2_0_0": _rmsprop(rho=0.5, epsilon=0.1),
    "rms_0_0.9": _rmsprop(momentum=0.9),
    "rms2_0_0.9": _rmsprop(rho=0.5, epsilon=0.1, momentum=0.9),
    "rms_1_0": _rmsprop(centered=True),
    "rms2_1_0": _rmsprop(rho=0.5, epsilon=0.1, centered=True),
    "rms_1_0.9": _rmsprop(momentum=0.9, centered=True),
    "rms2_1_0.9": _rmsprop(rho=0.5, epsilon=0.1, momentum=0.9, centered=True),
    "ftrl": (lambda: O.Ftrl(0.1), kernels.ftrl(0.1)),
    "ftrl_l1": (lambda: O.Ftrl(0.1, l1=0.3), kernels.ftrl(0.1, 0.3, 0.3)),
    "ftrl_l2": (lambda: O.Ftrl(0.1, l2=1.0), kernels.ftrl(0.1)),
    "ftrl_l1l2": (lambda: O.Ftrl(0.1, l1=0.3, l2=1.0), kernels.ftrl(0.1, 0.3, 0.3)),
    "ftrl_p": (
        lambda: O.Ftrl(0.1, l1=0.3, l2=1.0, lr_power=-0.7),
        kernels.ftrl(0.1, 0.3, 0.3, -0.7),
    ),
    "ftrl_p0": (
        lambda: O.Ftrl(0.1, l2=1.0, lr_power=-0.7),
        kernels.ftrl(0.1, power=-0.7),
    ),
    "ftrl_pz": (
        lambda: O.Ftrl(0.1, l1=0.2, l2=1.0, lr_power=0.0),
        kernels.ftrl(0.1, 0.2, 0.2, 0.0),
    ),
    "lamb": (lambda: O.Lamb(0.1), kernels.lamb(0.1)),
    "lamb2": (
        lambda: O.Lamb(0.1, lamb_weight_decay=0.2, beta1=0.5, beta2=0.7, epsilon=0.1),
        kernels.lamb(0.1, 0.2, 0.5, 0.7, 0.1),
    ),
    "lamb_ex": (
        lambda: O.Lamb(
            0.1,
            lamb_weight_decay=0.2,
            exclude_from_weight_decay_fn=lambda p: p.name == "w_lamb_ex",
        ),
        kernels.lamb(0.1, 0.0),
    ),
    # Without noise: it is random, and tested below.
    "dpsgd": (
        lambda: O.Dpsgd(0.1, clip=0.9, batch_size=2.0, sigma=0.0),
        kernels.clipped_by_norm(0.9, kernels.sgd(0.1)),
    ),
    "dpsgd_wide": (
        lambda: O.Dpsgd(0.1, clip=100.0, batch_size=2.0, sigma=0.0),
        kernels.sgd(0.1),
    ),
    # jaxfleet evaluates the update once; 1.8.5's result is tested below.
    "adadelta": (lambda: O.Adadelta(0.1), kernels.adadelta()),
    "adadelta2": (
        lambda: O.Adadelta(0.1, epsilon=0.1, rho=0.5),
        kernels.adadelta(0.1, 0.5),
    ),
}
SPARSE: dict[str, tuple[Callable[[], Any], Kernel]] = {
    name: DENSE[name]
    for name in DENSE
    if name.startswith(("sgd", "mom", "adagrad", "rms", "lamb")) or name in {"adam", "adam2"}
    if name != "lamb_ex"
}
SPARSE["adam_lazy"] = (DENSE["adam_lazy"][0], kernels.adam(0.1, is_lazy=True))
# 1.8.5 differs from its own formula in these; jaxfleet follows the formula.
_OTHERWISE_IN_FLUID = {"adadelta", "adadelta2"}
_OTHERWISE_OF_ROWS = {"adam", "adam2", "adam_lazy"}

RECORDED = cases("optimizer_cases")


def _variable(value: float) -> fluid.Variable:
    return layers.create_global_var([1], value, "float32", persistable=True)


def _drawn() -> tuple[Any, list[Any], Any, list[Any]]:
    """Draws as the recording did: initial values and gradients, then those of some rows."""
    random = np.random.RandomState(3)
    start = random.randn(*SHAPE).astype(np.float32)
    grads = [random.randn(*SHAPE).astype(np.float32) for _ in range(STEPS)]
    start_of_rows = random.randn(*ROWS).astype(np.float32)
    given = []
    for _ in range(STEPS):
        ids = random.choice([0, 1, 2, 4], (5, 1)).astype(np.int64)
        given.append((ids, random.randn(5, 3).astype(np.float32)))
    return start, grads, start_of_rows, given


START, GRADS, START_OF_ROWS, GIVEN = _drawn()


def _of_rows(ids: Any, x: Any) -> Any:
    whole = np.zeros(ROWS, np.float32)
    np.add.at(whole, ids[:, 0], x)
    return whole


def _trained(
    chosen: dict[str, tuple[Callable[[], Any], Kernel]], *, is_sparse: bool
) -> dict[str, list[Any]]:
    """Returns every case's parameter after each step, all trained in one program."""
    start = START_OF_ROWS if is_sparse else START
    begun = fluid.initializer.NumpyArrayInitializer(start)
    with fresh() as (main, startup), fluid.scope_guard(Scope()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* has no effect here", UserWarning)
        x = fluid.data("x", [None, 3] if is_sparse else SHAPE)
        ids = fluid.data("ids", [None, 1], dtype="int64")
        for name, (make, _) in chosen.items():
            attr = fluid.ParamAttr(f"w_{name}", initializer=begun)
            if is_sparse:
                rows = fluid.embedding(ids, ROWS, is_sparse=True, param_attr=attr)
                w = layers.reshape(rows, [-1, 3])
            else:
                w = layers.create_parameter(SHAPE, "float32", f"w_{name}", attr)
            loss = layers.reduce_sum(layers.elementwise_mul(w, x))
            make().minimize(loss, parameter_list=[f"w_{name}"])
        exe = fluid.Executor()
        exe.run(startup)
        found: dict[str, list[Any]] = {name: [] for name in chosen}
        for grad, (numbers, of_rows) in zip(GRADS, GIVEN, strict=True):
            feed = {"x": of_rows if is_sparse else grad, "ids": numbers}
            exe.run(main, feed=feed if is_sparse else {"x": grad})
            for name in chosen:
                found[name].append(np.array(fluid.global_scope()[f"w_{name}"]))
    return found


@pytest.fixture(scope="module")
def dense() -> dict[str, list[Any]]:
    return _trained(DENSE, is_sparse=False)


@pytest.fixture(scope="module")
def sparse() -> dict[str, list[Any]]:
    return _trained(SPARSE, is_sparse=True)


def _worked_out(kernel: Kernel, start: Any, grads: list[Any]) -> list[Any]:
    state: dict[str, Any] = {}
    found, w = [], start
    with np.errstate(invalid="ignore"):  # Ftrl computes 0 ** 0 - 0 ** 0, as in fluid
        for grad in grads:
            w = kernel(w, grad, state)
            found.append(w)
    return found


@pytest.mark.parametrize("name", DENSE)
def test_an_optimizer_steps_as_the_kernel_does(name: str, dense: dict[str, list[Any]]) -> None:
    wanted = _worked_out(DENSE[name][1], START, GRADS)
    for found, expected in zip(dense[name], wanted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SPARSE)
def test_gradients_of_rows_step_as_the_kernel_does(name: str, sparse: dict[str, list[Any]]) -> None:
    wanted = _worked_out(SPARSE[name][1], START_OF_ROWS, [_of_rows(*x) for x in GIVEN])
    for found, expected in zip(sparse[name], wanted, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in DENSE if name not in _OTHERWISE_IN_FLUID])
def test_an_optimizer_trains_to_what_fluid_did(name: str, dense: dict[str, list[Any]]) -> None:
    one, ten = RECORDED["dense"][name]
    np.testing.assert_allclose(dense[name][0], one, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(dense[name][-1], ten, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", [name for name in SPARSE if name not in _OTHERWISE_OF_ROWS])
def test_rows_train_to_what_fluid_did(name: str, sparse: dict[str, list[Any]]) -> None:
    one, ten = RECORDED["sparse"][name]
    np.testing.assert_allclose(sparse[name][0], one, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(sparse[name][-1], ten, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["adadelta", "adadelta2"])
def test_adadelta_evaluates_its_update_once_where_fluid_did_twice(
    name: str, dense: dict[str, list[Any]]
) -> None:
    options = {} if name == "adadelta" else {"epsilon": 0.1, "rho": 0.5}
    twice = kernels.adadelta(**options, evaluated_twice=True)
    theirs = _worked_out(twice, START, GRADS)
    np.testing.assert_allclose(theirs[0], RECORDED["dense"][name][0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(theirs[-1], RECORDED["dense"][name][1], rtol=1e-6, atol=1e-6)
    assert np.abs(dense[name][0] - theirs[0]).max() > 1e-4


@pytest.mark.parametrize("name", ["adam", "adam2", "adam_lazy"])
def test_adam_corrects_bias_by_this_steps_powers_where_fluids_rows_used_the_next(
    name: str, sparse: dict[str, list[Any]]
) -> None:
    options: dict[str, Any] = {"adam2": {"beta1": 0.5, "beta2": 0.7, "epsilon": 0.1}}.get(name, {})
    is_lazy = name == "adam_lazy"
    ahead = kernels.adam(0.1, **options, is_lazy=is_lazy, are_powers_ahead=True)
    theirs = _worked_out(ahead, START_OF_ROWS, [_of_rows(*x) for x in GIVEN])
    np.testing.assert_allclose(theirs[0], RECORDED["sparse"][name][0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(theirs[-1], RECORDED["sparse"][name][1], rtol=4e-6, atol=4e-6)
    assert np.abs(sparse[name][0] - theirs[0]).max() > 1e-3


def test_lazy_rows_without_a_gradient_stay_where_others_move_on(
    sparse: dict[str, list[Any]],
) -> None:
    seen = [set(ids[:, 0].tolist()) for ids, _ in GIVEN]
    at, row = next((at, row) for at in range(1, STEPS) for row in seen[at - 1] - seen[at])
    lazy, plain = sparse["adam_lazy"], sparse["adam"]
    np.testing.assert_array_equal(lazy[at][row], lazy[at - 1][row])
    assert (plain[at][row] != plain[at - 1][row]).all()


def _noise(count: int, *, seed: int = 0) -> list[Any]:
    """Returns the updates of two parameters by a Dpsgd of rate 1, whose gradients are zero."""
    with fresh() as (main, startup), fluid.scope_guard(Scope()):
        main.random_seed = seed
        x = fluid.data("x", [3])
        zero = fluid.initializer.Constant(0.0)
        made = [
            layers.create_parameter([3], "float32", n, fluid.ParamAttr(n, initializer=zero))
            for n in ("v", "w")
        ]
        loss = layers.reduce_sum(layers.elementwise_mul(layers.sums(made), x))
        O.Dpsgd(1.0, clip=1.0, batch_size=4.0, sigma=2.0).minimize(loss)
        exe = fluid.Executor()
        exe.run(startup)
        found = [[np.array(fluid.global_scope()[n]) for n in ("v", "w")]]
        for _ in range(count):
            exe.run(main, feed={"x": np.zeros(3, np.float32)})
            found.append([np.array(fluid.global_scope()[n]) for n in ("v", "w")])
    return list(np.diff(found, axis=0))


def test_dpsgd_draws_one_number_for_a_parameter_and_step_by_the_programs_seed() -> None:
    noise = np.asarray(_noise(200))
    np.testing.assert_allclose(noise, noise[:, :, :1].repeat(3, 2), rtol=0, atol=1e-5)
    drawn = noise[:, :, 0].ravel()
    assert len(np.unique(drawn.round(5))) > 390
    assert drawn.std() == pytest.approx(2.0 / 4.0, rel=0.15)
    assert abs(drawn.mean()) < 0.1
    np.testing.assert_allclose(_noise(2), noise[:2], atol=1e-6)
    assert (np.asarray(_noise(2, seed=1)) != noise[:2]).all()


def test_ftrl_warns_once_that_fluid_hands_its_operator_l1_for_l2() -> None:
    with pytest.warns(UserWarning, match="Ftrl's l2 has no effect here: as fluid 1.8.5"):
        O.Ftrl(0.05, l1=0.5, l2=1.0)
    O.Ftrl(0.05, l1=0.5, l2=1.0)


def test_adadelta_warns_once_that_it_reads_no_rate() -> None:
    with pytest.warns(UserWarning, match="Adadelta's learning_rate has no effect here"):
        O.Adadelta(0.1)
    O.Adadelta(0.1)


def test_the_state_of_a_named_optimizer_has_its_name() -> None:
    with fresh() as (main, _):
        x = fluid.data("x", [None, 2])
        loss = layers.mean(layers.fc(x, 1, param_attr="w", bias_attr=False))
        O.Momentum(0.1, 0.9, name="slow").minimize(loss)
        assert "w_slow_velocity_0" in main.global_block().vars
