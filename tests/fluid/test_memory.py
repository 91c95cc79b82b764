"""`memory_optimize` and `release_memory` in scripts: rejections, and equal results."""

from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxfleet as jf
from jaxfleet import fluid
from jaxfleet.fluid import layers
from jaxfleet.ir import Kind
from tests.fluid.nets import fresh
from tests.fluid.parallel import Trained, batch, devices, sgd
from tests.fluid.pserver.jobs import run_job, shared_out

BATCHES = [batch(8, seed) for seed in range(2)]


def net() -> tuple[fluid.Variable, fluid.Variable]:
    """Returns a loss and a prediction after layers of one size, which can share names."""
    x, y = fluid.data("x", [None, 6]), fluid.data("y", [None, 1], "int64")
    hidden = x
    for _ in range(3):
        hidden = layers.fc(hidden, 6, act="tanh")
    out = layers.fc(hidden, 3, act="softmax")
    return layers.mean(layers.cross_entropy(out, y)), out


def optimize(main: fluid.Program, *skip: Any) -> None:
    """Runs both; fails if neither had an effect."""
    before = str(main)
    fluid.memory_optimize(main, skip_opt_set={*skip}, level=1)
    assert sum(op.has_attr("instead_of") for op in main.global_block().ops) > 2
    fluid.release_memory(main, list(skip))
    assert str(main) != before


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"level": 2}, ValueError, "only support opt_level 0 or 1"),
        ({"skip_opt_set": "loss"}, ValueError, "only support skip_opt_set as set"),
        ({"skip_opt_set": ("loss",)}, ValueError, "only support skip_opt_set as set"),
        ({"skip_opt_set": {1}}, TypeError, "holds a int"),
        ({"input_program": "main"}, TypeError, "a program is wanted, not str"),
    ],
)
def test_what_is_no_program_level_or_set_is_refused(
    given: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        fluid.memory_optimize(**{"input_program": fluid.Program(), **given})


def test_a_program_of_the_ir_is_returned_anew() -> None:
    def step(state: Any, batch: Any) -> Any:
        for _ in range(3):
            batch = jnp.sin(jnp.cos(batch))
        return state + batch, batch

    x = np.linspace(0, 1, 4, dtype=np.float32)
    program = jf.capture(step, example=(x, x)).program
    made = jf.memory_optimize(program)
    assert "instead_of" in str(made)
    assert "instead_of" not in str(program)
    assert "delete_var" in str(jf.release_memory(made))
    names = [op.reads[0] for op in program.root.ops if op.type == "fetch"]
    found = []
    for one in (program, made, jf.release_memory(made)):
        exe = jf.Executor()
        exe.scope.update({v.name: x for v in one.of_kind(Kind.PARAM, Kind.STATE)})
        feed = {v.name: x for v in one.of_kind(Kind.DATA)}
        found.append(exe.run(one, feed=feed, fetch=names))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["executor", "compiled", "parallel"])
def test_training_is_the_same_to_the_bit(how: str) -> None:
    seen = []
    for shares in (False, True):
        with devices(2):
            trained = Trained(sgd, net)
            if shares:
                optimize(trained.main, trained.loss, trained.out)
            fetch = [trained.loss.name, trained.out.name]
            program: Any = trained.main
            if how == "compiled":
                made = fluid.CompiledProgram(program)
                program = made.with_data_parallel(loss_name=trained.loss.name)
            run: Any = partial(trained.exe.run, program, scope=trained.scope)
            if how == "parallel":
                run = trained.parallel().run
            lost = [run(feed=fed, fetch_list=fetch) for fed in BATCHES]
        seen.append([*(x for pair in lost for x in pair), *trained.parameters().values()])
    for one, other in zip(*seen, strict=True):
        np.testing.assert_array_equal(one, other)


def test_dropout_draws_the_same_masks() -> None:
    seen = []
    for shares in (False, True):
        with fresh() as (main, _):
            main.random_seed = 7
            hidden = layers.dropout(fluid.data("x", [None, 6]), 0.3)
            loss = layers.mean(layers.dropout(layers.scale(hidden, 2.0), 0.3))
            if shares:
                fluid.memory_optimize(main, {loss.name}, level=1)
                fluid.release_memory(main, {loss.name})
        exe, scope, feed = fluid.Executor(fluid.CPUPlace()), fluid.Scope(), {"x": BATCHES[0]["x"]}
        seen.append([exe.run(main, feed, [loss], scope=scope)[0] for _ in range(2)])
    np.testing.assert_array_equal(seen[0], seen[1])


def test_copies_saved_programs_and_models_know_where_values_lie(tmp_path: Path) -> None:
    trained = Trained(sgd, net)
    run = partial(trained.exe.run, feed=BATCHES[0], fetch_list=[trained.out], scope=trained.scope)
    (wanted,) = run(trained.test)
    optimize(trained.main, trained.loss)
    text = trained.main.clone().serialize_to_string()
    copy = fluid.Program.parse_from_string(text)
    assert copy._is_mem_optimized
    used = copy.clone(for_test=True)  # without backward, which overwrites the prediction
    np.testing.assert_array_equal(run(used)[0], wanted)
    np.testing.assert_array_equal(run(used, use_prune=True)[0], wanted)
    for prunes in (False, True):
        with pytest.raises(ValueError, match="is fetched, and memory_optimize gave its memory"):
            run(copy, use_prune=prunes)
    with fluid.scope_guard(trained.scope):
        fed, exe = {"x": BATCHES[0]["x"]}, trained.exe
        fluid.io.save_inference_model(str(tmp_path), ["x"], [trained.out], exe, used)
        model, _, targets = fluid.io.load_inference_model(str(tmp_path), exe)
        np.testing.assert_array_equal(exe.run(model, feed=fed, fetch_list=targets)[0], wanted)


def test_what_shares_a_name_is_not_fed() -> None:
    trained = Trained(sgd, net)
    optimize(trained.main, trained.loss)
    ops = [op for op in trained.main.global_block().ops if op.has_attr("instead_of")]
    ((_, name), *_) = ops[0].attr("instead_of")
    value = np.zeros((8, 6), np.float32)
    with pytest.raises(ValueError, match="is fed, and memory_optimize gave its memory"):
        trained.exe.run(trained.main, {**BATCHES[0], name: value}, scope=trained.scope)


@pytest.mark.few(1)
@pytest.mark.parametrize("first", ["memory", "transpiler"])
def test_a_rank_trains_the_same(first: str) -> None:
    seen = []
    for shares in (False, True):
        scope, exe = fluid.Scope(), fluid.Executor(fluid.CPUPlace())
        with fresh() as (main, startup):
            main.random_seed = startup.random_seed = 5
            loss, _ = net()
            fluid.optimizer.SGD(0.5).minimize(loss)
            if shares and first == "memory":
                optimize(main, loss)
            config = fluid.DistributeTranspilerConfig()
            config.mode, config.collective_mode = "collective", "grad_allreduce"
            config.wait_port = False
            fluid.DistributeTranspiler(config).transpile(
                0, main, trainers="127.0.0.1:1,127.0.0.1:2", startup_program=startup,
                current_endpoint="127.0.0.1:1",
            )  # fmt: skip
            if shares and first == "transpiler":
                optimize(main, loss)
        exe.run(startup, scope=scope)
        seen.append([exe.run(main, fed, [loss], scope=scope)[0] for fed in BATCHES])
    np.testing.assert_array_equal(seen[0], seen[1])


def _decayed(*, shares: bool) -> fluid.Variable:
    loss, _ = net()
    decay = fluid.regularizer.L2Decay(1e-3)
    fluid.optimizer.Momentum(0.1, 0.9, regularization=decay).minimize(loss)
    if shares:
        optimize(fluid.default_main_program(), loss)
    return loss


@pytest.mark.grid
def test_servers_train_the_same_before_the_transpiler() -> None:
    feeds = shared_out(BATCHES, 2)
    one, other = (run_job(partial(_decayed, shares=shares), feeds) for shares in (False, True))
    assert one.losses == other.losses
    for name, value in one.params[0].items():
        np.testing.assert_array_equal(value, other.params[0][name])


@pytest.mark.grid
def test_servers_train_the_same_behind_the_transpiler(monkeypatch: pytest.MonkeyPatch) -> None:
    feeds, build = shared_out(BATCHES, 2), partial(_decayed, shares=False)
    one = run_job(build, feeds)
    transpiled = fluid.DistributeTranspiler.get_trainer_program

    def shared(self: Any, wait_port: bool = True) -> fluid.Program:
        main = transpiled(self, wait_port)
        if not main._is_mem_optimized:
            optimize(main, "mean_0.tmp_0")
        return main

    monkeypatch.setattr(fluid.DistributeTranspiler, "get_trainer_program", shared)
    assert one.losses == run_job(build, feeds).losses
