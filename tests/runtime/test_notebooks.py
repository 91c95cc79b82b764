"""What notebooks show of steps, their reports and plans: escaped, balanced, of bounded size."""

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from IPython.core.formatters import DisplayFormatter

import jaxfleet as jf
from jaxfleet.analysis.placement.transfer_plan import transfer_plan
from jaxfleet.env import PserverRole
from jaxfleet.passes import Dispatch, GradAllreduce, InsertSendRecv, SliceVar
from jaxfleet.pipeline import run_pipeline
from jaxfleet.runtime.pserver_entry import ServerStep
from jaxfleet.runtime.step_html import Explanation
from tests.markup import text_of
from tests.runtime.test_step_view import programs_in

HOSTILE = "<script>alert('1')</script>"
TX = jf.distributed_optimizer(optax.adam(0.1))
ENDPOINTS = ("127.0.0.1:6174", "127.0.0.1:6175")


def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    def loss_of(params: Any) -> jax.Array:
        h = batch["x"]
        for w in params.values():
            h = jnp.tanh(h @ w)
        return jnp.mean(jnp.square(h))

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def example(layers: int = 2, width: int = 4) -> tuple[Any, Any]:
    names = [HOSTILE, "日本 'é'", *(f"w{n}" for n in range(layers - 2))]
    params = {name: jnp.eye(width) for name in names}
    return {"params": params, "opt": TX.init(params)}, {"x": jnp.ones((8, width))}


@cache
def step() -> Any:
    return jf.distribute(train_step, example(), jf.DistributedStrategy(devices=2))


def in_notebook(value: object) -> str:
    """Returns the text of what a notebook shows, after checking the elements."""
    (data, _) = DisplayFormatter().format(value)
    assert HOSTILE not in data["text/html"]
    return text_of(data["text/html"])


def test_a_step_says_what_it_is_and_where_its_text_is() -> None:
    shown = in_notebook(step())
    assert shown.startswith("Step train_step")
    assert "modecollective" in shown
    assert "2 cpu devices" in shown
    assert "2 parameters of 128 B, 5 other leaves of 260 B" in shown
    assert f"any batch size: {step().program.op_count} operators" in shown
    assert "step.view(path)" in shown


def test_a_step_lists_what_was_compiled_for_other_batches(tmp_path: Path) -> None:
    made = jf.distribute(of_size, example(), "single")
    made(*example())
    made(example()[0], {"x": jnp.ones((5, 4))})
    shown = in_notebook(made)
    assert "batch of 8: " in shown
    assert "batch of 5: " in shown
    found = programs_in(made.view(tmp_path / "step.html"))
    assert [program["label"] for program in found] == ["batch of 8", "batch of 5"]
    assert all("captured for each batch size" in program["notes"][0] for program in found)


def of_size(state: Any, batch: Any) -> tuple[Any, Any]:
    """A step whose program depends on the number of rows."""
    state, loss = train_step(state, batch)
    return state, loss * (2.0 if batch["x"].shape[0] > 6 else 3.0)


def test_a_step_of_several_arguments_shows_how_it_is_called() -> None:
    def one(w: Any, x: Any, y: Any) -> tuple[Any, Any]:
        return w - 0.1 * (x.T @ (x @ w - y)), jnp.mean(y)

    made = jf.distribute(one, (jnp.ones(3), jnp.ones((4, 3)), jnp.ones(4)), "single")
    assert "called as step(w, x, y)" in in_notebook(made)


def test_a_trainer_and_a_server_show_their_part_of_the_job() -> None:
    captured = jf.capture(train_step, example=example())
    strategy = jf.DistributedStrategy(mode="pserver")
    cluster = PserverRole("pserver", 2, ENDPOINTS, current_endpoint=ENDPOINTS[1])
    server: ServerStep[Any, Any] = ServerStep(captured, strategy, cluster)
    assert "server 1 of 2" in in_notebook(server)
    shown: list[str] = []

    def script(made: Any) -> tuple[Any, tuple[Any, ...]]:
        shown.append(in_notebook(made))
        in_notebook(made.explain())
        state, metrics = made(*example())
        return made.pull(state), (metrics,)

    jf.Twin(captured, None, strategy, servers=2, trainers=2).play(script)
    assert "2 servers, 2 trainers" in shown[0]
    assert "server 1: " in shown[0]


def test_an_explanation_is_a_string_that_notebooks_show_as_a_list() -> None:
    text = step().explain()
    assert isinstance(text, str)
    assert str(text) == "\n".join(text.splitlines())
    assert repr(text) == repr(str(text))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    shown = " ".join(in_notebook(text).split())
    assert all(line in shown for line in lines)


def test_a_long_explanation_is_cut_short() -> None:
    text = Explanation("\n".join(["step", *(f"  {n} {'x' * 5_000}" for n in range(1_000))]))
    (data, _) = DisplayFormatter().format(text)
    assert "800 more: print it" in text_of(data["text/html"])
    assert len(data["text/html"]) < 300_000


def test_the_passes_of_a_step_are_a_table() -> None:
    shown = in_notebook(step().dumps)
    assert "00_input" in shown
    assert all(stage.label in shown for stage in step().dumps)


@pytest.mark.few(1)
@pytest.mark.parametrize("budget", [None, 0.8])
def test_a_memory_report_has_its_totals_and_a_curve(budget: float | None) -> None:
    strategy = jf.DistributedStrategy(mode="single", memory_budget=budget)
    state, batch = example(layers=8, width=64)
    batch = {"x": jnp.ones((512, 64))}
    made = jf.distribute(train_step, (state, batch), strategy)
    assert isinstance(made, jf.Step)
    report = made.memory_report()
    shown = in_notebook(report)
    (data, _) = DisplayFormatter().format(report)
    assert shown.startswith("MemoryReport train_step")
    assert "largest values at the peak" in shown
    assert len(data["text/html"]) < 40_000
    assert data["text/html"].count("<path") == (3 if budget is None else 7)  # axes, curves, legend
    if report.fit is not None:
        assert report.fit.note in shown
        assert report.fit.note in in_notebook(report.fit)
        assert report.fit.note in in_notebook(made)


def test_a_plan_shows_servers_and_folds_their_slices() -> None:
    program = jf.capture(train_step, example=example()).program
    placing = SliceVar(servers=2, min_block_size=1), Dispatch(endpoints=ENDPOINTS, servers=2)
    placed = run_pipeline(program, [GradAllreduce(devices=2), *placing])
    trainer = run_pipeline(placed, [InsertSendRecv(trainers=2)])
    plan = transfer_plan(placed, trainers=2, trainer=trainer)
    shown = in_notebook(plan)
    assert "2 servers \u00b7 2 trainers" in shown
    assert f"params/{HOSTILE}.block0" in shown
    assert all(line.strip() in shown for line in plan.extras.lines())


def test_many_parameters_make_a_small_cell() -> None:
    params = {f"p{n:05}": jax.ShapeDtypeStruct((2,), jnp.float32) for n in range(2_000)}

    def update(state: Any, batch: Any) -> tuple[Any, Any]:
        return dict(state), jnp.mean(batch)

    batch = jax.ShapeDtypeStruct((8,), jnp.float32)
    program = jf.capture(update, example=(params, batch)).program
    (data, _) = DisplayFormatter().format(program)
    assert len(data["text/html"]) < 60_000
    assert "1,949 lines left out" in text_of(data["text/html"])
