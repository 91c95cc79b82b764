"""Recomputation in fluid's programs: the same results, in less memory."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid import layers
from jaxfleet.fluid.pserver import runs
from jaxfleet.fluid.pserver.normalization import TrainerProgram, normalize_trainer
from jaxfleet.ir import Operands, Operator, Program
from jaxfleet.lower import OnOne, StagedStep
from tests.fluid.nets import fresh
from tests.fluid.parallel import Feed, Trained, batch, devices
from tests.fluid.pserver.jobs import run_job, shared_out

WIDE, ROWS = 64, 256


def deep() -> tuple[fluid.Variable, fluid.Variable]:
    """Returns a loss and a prediction after six layers of one width, with masks and statistics."""
    x, y = fluid.data("x", [None, 6]), fluid.data("y", [None, 1], "int64")
    hidden = x
    for place in range(6):
        hidden = layers.fc(hidden, WIDE, act="tanh", name=f"layer{place}")
        hidden = layers.dropout(hidden, 0.2)
    hidden = layers.batch_norm(hidden)
    out = layers.fc(hidden, 3, act="softmax")
    return layers.mean(layers.cross_entropy(out, y)), out


def plain() -> Any:
    return fluid.optimizer.Momentum(0.05, 0.9, grad_clip=fluid.clip.GradientClipByGlobalNorm(1.0))


def with_checkpoints(inner: Any = None) -> Any:
    made = fluid.optimizer.RecomputeOptimizer(plain() if inner is None else inner)
    block = fluid.default_main_program().global_block()
    tanhs = [op.output("Out")[0] for op in block.ops if op.type == "tanh"]
    made._set_checkpoints([block.var(tanhs[1]), tanhs[3]])
    return made


def trained(net: Trained, runs: Any = None) -> tuple[Any, dict[str, Any]]:
    """Returns the losses, and the final content of the scope."""
    feeds: list[Feed] = [batch(ROWS, seed) for seed in range(3)]
    program = runs if runs is not None else net.main
    losses = [net.exe.run(program, fed, [net.loss], scope=net.scope)[0] for fed in feeds]
    names = [v.name for v in net.main.list_vars() if v.persistable]
    return np.array(losses), {name: np.array(net.scope[name]) for name in names}


def peak_of(net: Trained, *, whole: bool = False) -> int:
    """Returns the peak of the run, or of the same as one executable."""
    (plan,) = net.exe._local._plans._known.get(net.main).values()
    made, program = plan.prepared, plan.prepared.program
    if whole:
        wanted = Operator("fetch", Operands.of(net.loss.name))
        program = program.with_block(program.root.with_ops([*program.root.ops, wanted]))
    data = tuple(v.name for v in made.data)
    layout = OnOne(jax.devices()[0])
    parts = StagedStep(
        program, plan.given, plan.state, data, made.written, (net.loss.name,), layout
    )
    fed = batch(ROWS)
    return parts.peak([np.shape(fed.get(name, 0)) for name in data]).bytes


@pytest.mark.grid
def test_what_is_computed_stays_and_takes_less_memory() -> None:
    net = Trained(plain, deep)
    losses, state = trained(net)
    again = Trained(with_checkpoints, deep)
    found, held = trained(again)
    # The same operations on the same masks; other fusions round differently.
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for name, value in state.items():
        np.testing.assert_allclose(held[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert peak_of(again) < 0.75 * peak_of(net, whole=True)


def turned(x: fluid.Variable) -> fluid.Variable:
    """Returns the result of a `While` that rewrites a variable and runs a `cond` in each turn."""
    made, big = layers.assign(x), layers.fill_constant([1], "float32", 1e6)
    i, n = (layers.fill_constant([1], "int64", value) for value in (0, 2))
    condition = layers.less_than(i, n)
    loop = layers.While(condition)
    with loop.block():
        hidden = layers.dropout(layers.fc(made, 6, act="tanh", param_attr="turn"), 0.2)
        small = layers.less_than(layers.reduce_sum(made), big)
        branch = layers.cond(small, lambda: layers.scale(hidden, 2.0), lambda: made * 1.0)
        layers.assign(branch, made)
        layers.increment(i, in_place=True)
        layers.less_than(i, n, cond=condition)
    return made


def looped(x: fluid.Variable) -> fluid.Variable:
    i, n = (layers.fill_constant([1], "int64", value) for value in (0, 3))
    _, made = layers.while_loop(
        lambda i, _: layers.less_than(i, n),
        lambda i, h: [i + 1, layers.dropout(layers.fc(h, 6, act="tanh", param_attr="turn"), 0.2)],
        [i, x],
    )
    return made


@pytest.mark.grid
@pytest.mark.parametrize("between", [turned, pytest.param(looped, marks=pytest.mark.grid)])
def test_a_loop_that_rewrites_variables_is_computed_again(between: Any) -> None:
    kept: list[fluid.Variable | str] = []

    def net() -> tuple[fluid.Variable, fluid.Variable]:
        x, y = fluid.data("x", [None, 6]), fluid.data("y", [None, 1], "int64")
        begun = layers.fc(x, 6, act="tanh")
        ended = layers.fc(between(begun), 6, act="tanh")
        out = layers.fc(ended, 3, act="softmax")
        kept[:] = [begun.name, ended.name]
        return layers.mean(layers.cross_entropy(out, y)), out

    def again() -> Any:
        made = fluid.optimizer.RecomputeOptimizer(plain())
        made._set_checkpoints(list(kept))
        return made

    one, two = Trained(plain, net), Trained(again, net)
    losses, state = trained(one)
    found, held = trained(two)
    assert "@RECOMPUTE" in str(run_of(two))
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for name, value in state.items():
        np.testing.assert_allclose(held[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def run_of(net: Trained) -> Program:
    (plan,) = net.exe._local._plans._known.get(net.main).values()
    made: Program = plan.prepared.program
    return made


@pytest.mark.grid
def test_devices_compute_again_too() -> None:
    found = []
    for optimizer in (plain, with_checkpoints):
        with devices(2):
            net = Trained(optimizer, deep)
            compiled = fluid.CompiledProgram(net.main).with_data_parallel(net.loss.name)
            found.append(trained(net, compiled))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5)
    for name, value in found[0][1].items():
        np.testing.assert_allclose(found[1][1][name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_an_optimizer_that_is_told_nothing_or_nonsense() -> None:
    made = fluid.optimizer.RecomputeOptimizer(plain())
    with fresh():
        loss, _ = deep()
        with pytest.raises(ValueError, match="You should call _set_checkpoints first"):
            made.minimize(loss)
        with pytest.raises(TypeError, match="a checkpoint is of type int"):
            made._set_checkpoints([3])  # type: ignore[list-item]  # the tested mistake
        made._set_checkpoints(["layer9"])
        with pytest.raises(ValueError, match="'layer9' is to be kept for backward"):
            made.minimize(loss)
    with pytest.raises(TypeError, match="made of is of type str"):
        fluid.optimizer.RecomputeOptimizer("Adam")  # type: ignore[arg-type]  # as that


def served(*, again: bool) -> fluid.Variable:
    loss, _ = deep()
    momentum = fluid.optimizer.Momentum(0.05, 0.9)
    (with_checkpoints(momentum) if again else momentum).minimize(loss)
    return loss


@pytest.mark.grid
def test_trainers_of_servers_compute_again_too(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = []

    def plainly(program: Program, fetch: Sequence[str]) -> TrainerProgram:
        made = normalize_trainer(program, fetch)
        cuts.append(sum(op.type == "cut" for op in made.program.root.ops))
        return made

    monkeypatch.setattr(runs, "normalize_trainer", plainly)
    feeds = shared_out([batch(8, seed) for seed in range(2)], 2)
    one, other = (run_job(partial(served, again=again), feeds) for again in (False, True))
    assert max(cuts) == 4
    np.testing.assert_allclose(other.losses, one.losses, rtol=1e-5)
    for name, value in one.params[0].items():
        np.testing.assert_allclose(other.params[0][name], value, rtol=1e-4, atol=1e-5, err_msg=name)
