"""Checkpoints of forward in fluid's programs: the same results, in less memory."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.fluid import layers
from jaxfleet.fluid.pserver import runs
from jaxfleet.fluid.pserver.programs import PlainTrainer, plain_trainer
from jaxfleet.ir import Operands, Operator, Program
from jaxfleet.lower import OnOne, PartStep
from tests.fluid.nets import fresh
from tests.fluid.parallel import Feed, Trained, batch, devices
from tests.fluid.pserver.jobs import run_job, shared_out

WIDE, ROWS = 64, 256


def deep() -> tuple[fluid.Variable, fluid.Variable]:
    """Returns a loss and a prediction behind six layers of one width, with masks and statistics."""
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
    """Returns the losses, and what the scope has then."""
    feeds: list[Feed] = [batch(ROWS, seed) for seed in range(3)]
    program = runs if runs is not None else net.main
    losses = [net.exe.run(program, fed, [net.loss], scope=net.scope)[0] for fed in feeds]
    names = [v.name for v in net.main.list_vars() if v.persistable]
    return np.array(losses), {name: np.array(net.scope[name]) for name in names}


def peak_of(net: Trained, *, whole: bool = False) -> int:
    """Returns the peak of what ran, or of the same as one executable."""
    (plan,) = net.exe._local._plans._known.get(net.main).values()
    made, program = plan.prepared, plan.prepared.program
    if whole:
        wanted = Operator("fetch", Operands.of(net.loss.name))
        program = program.with_block(program.root.with_ops([*program.root.ops, wanted]))
    data = tuple(v.name for v in made.data)
    layout = OnOne(jax.devices()[0])
    parts = PartStep(program, plan.given, plan.state, data, made.written, (net.loss.name,), layout)
    fed = batch(ROWS)
    return parts.peak([np.shape(fed.get(name, 0)) for name in data]).bytes


def test_what_is_computed_stays_and_takes_less_memory() -> None:
    net = Trained(plain, deep)
    losses, state = trained(net)
    again = Trained(with_checkpoints, deep)
    found, held = trained(again)
    # The same operations on the same masks; fused otherwise, they round otherwise.
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for name, value in state.items():
        np.testing.assert_allclose(held[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert peak_of(again) < 0.75 * peak_of(net, whole=True)


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
            made._set_checkpoints([3])  # type: ignore[list-item]  # what is tested
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

    def plainly(program: Program, fetch: Sequence[str]) -> PlainTrainer:
        made = plain_trainer(program, fetch)
        cuts.append(sum(op.type == "cut" for op in made.program.root.ops))
        return made

    monkeypatch.setattr(runs, "plain_trainer", plainly)
    feeds = shared_out([batch(8, seed) for seed in range(2)], 2)
    one, other = (run_job(partial(served, again=again), feeds) for again in (False, True))
    assert max(cuts) == 4
    np.testing.assert_allclose(other.losses, one.losses, rtol=1e-5)
    for name, value in one.params[0].items():
        np.testing.assert_allclose(other.params[0][name], value, rtol=1e-4, atol=1e-5, err_msg=name)
