"""Every operator refers to the user's line, even if a library created it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfleet as jf
from jaxfleet.ir import Operator, Program, Source, print_program

BATCH = np.ones((4, 3), np.float32)


def captured(step: Any, state: Any) -> Program:
    return jf.capture(step, example=(state, BATCH)).program


def ops_of(program: Program, op_type: str) -> list[Operator]:
    return [op for block in program.blocks for op in block.ops if op.type == op_type]


def line(op: Operator) -> str:
    assert Path(op.source.file).name == "test_sources.py"
    return op.source.where().split("\n")[-1].strip()


def test_an_operator_of_the_users_points_at_its_line() -> None:
    def step(state: Any, batch: Any) -> Any:
        hidden = jnp.tanh(batch * state)  # here
        return state, hidden.sum()

    (op,) = ops_of(captured(step, jnp.ones(3)), "jax.tanh")
    assert line(op) == "hidden = jnp.tanh(batch * state)  # here"
    assert "step" in op.source.function


def test_an_operator_of_a_library_points_at_the_call() -> None:
    def step(state: Any, batch: Any) -> Any:
        return state, optax.huber_loss(batch * state).mean()  # the call

    program = captured(step, jnp.ones(3))
    assert {line(op) for op in ops_of(program, "jax.abs")} == {
        "return state, optax.huber_loss(batch * state).mean()  # the call"
    }


def test_the_optimizers_operators_point_at_the_update() -> None:
    tx = jf.distributed_optimizer(optax.adam(0.1))

    def step(state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda w: jnp.square(batch @ w).mean())(state["w"])
        updates, opt = tx.update(grads, state["opt"], state["w"])  # the update
        return {"w": state["w"] + updates, "opt": opt}, {}

    program = captured(step, {"w": jnp.ones(3), "opt": tx.init(jnp.ones(3))})
    assert "# the update" in line(ops_of(program, "jax.sqrt")[0])


def test_what_a_library_puts_into_a_loop_points_at_the_loop() -> None:
    tx = jf.distributed_optimizer(optax.MultiSteps(optax.adam(0.1), 2))

    def step(state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda w: jnp.square(batch @ w).mean())(state["w"])
        updates, opt = tx.update(grads, state["opt"], state["w"])  # the update
        return {"w": state["w"] + updates, "opt": opt}, {}

    program = captured(step, {"w": jnp.ones(3), "opt": tx.init(jnp.ones(3))})
    assert program.blocks[1:]
    assert "# the update" in line(ops_of(program, "jax.sqrt")[0])


def test_a_gradient_points_at_the_line_that_it_is_the_derivative_of() -> None:
    tx = jf.distributed_optimizer(optax.sgd(0.1))

    def step(state: Any, batch: Any) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.square(batch @ w).mean()  # the loss

        updates, _ = tx.update(jax.grad(loss)(state), tx.init(state), state)
        return state + updates, {}

    program = captured(step, jnp.ones(3))
    (op,) = [op for op in program.root.ops if op.role_var]
    assert "# the loss" in line(op)


class Net(nn.Module):
    """Two layers, for their scopes."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(2, name="last")(nn.Dense(4)(x))


def test_scopes_are_the_modules_that_flax_names() -> None:
    net = Net()
    params = net.init(jax.random.key(0), BATCH)
    program = captured(lambda state, batch: (state, net.apply(state, batch).sum()), params)
    assert [op.source.scope for op in ops_of(program, "jax.dot_general")] == [
        "Net/Dense_0",
        "Net/last",
    ]


def test_source_lines_are_printed_on_request() -> None:
    def step(state: Any, batch: Any) -> Any:
        return state, jnp.tanh(batch * state).sum()

    program = captured(step, jnp.ones(3))
    assert "# capture/test_sources.py:" in print_program(program, source=True)
    assert "test_sources" not in print_program(program)


@jax.jit
def _layer(x: Any) -> Any:
    return _act(x)


def _act(x: Any) -> Any:
    return jnp.tanh(x)


def _names(op: Operator) -> list[str]:
    functions = [*(frame.function for frame in op.source.callers), op.source.function]
    return [name.rpartition(".")[2] for name in functions]


def _calls(op: Operator) -> list[str]:
    """Returns the texts of the lines that lead to an operator's."""
    return [line(replace(op, source=Source(*frame))) for frame in op.source.callers]


def test_an_operator_has_the_calls_that_lead_to_its_line() -> None:
    _layer(jnp.ones(BATCH.shape))  # jax keeps this trace: its frames are of no call in the step

    def loss(state: Any, x: Any) -> Any:
        x = _layer(x * state)  # the first
        return _layer(x).sum()  # the second

    def step(state: Any, batch: Any) -> Any:
        return state, loss(state, batch)

    first, second = ops_of(captured(step, jnp.ones(3)), "jax.tanh")
    assert _names(first) == _names(second) == ["step", "loss", "_layer", "_act"]
    assert _calls(first)[1] == "x = _layer(x * state)  # the first"
    assert _calls(second)[1] == "return _layer(x).sum()  # the second"
    assert line(first) == "return jnp.tanh(x)"


def test_a_loops_operators_have_the_calls_around_the_loop() -> None:
    def body(x: Any, _: Any) -> Any:
        return _layer(x), None

    def step(state: Any, batch: Any) -> Any:
        def loss(state: Any) -> Any:
            return jax.lax.scan(body, batch * state, None, length=2)[0].sum()

        return state, jax.value_and_grad(loss)(state)[0]

    found = ops_of(captured(step, jnp.ones(3)), "jax.tanh")
    assert {tuple(_names(op)) for op in found} == {("step", "loss", "body", "_layer", "_act")}


def test_operators_of_a_line_share_their_calls() -> None:
    def inner(x: Any) -> Any:
        return jnp.tanh(x) + jnp.exp(x)

    def step(state: Any, batch: Any) -> Any:
        return state, inner(batch * state).sum()

    program = captured(step, jnp.ones(3))
    (one,), (other,) = ops_of(program, "jax.tanh"), ops_of(program, "jax.exp")
    assert one.source.callers
    assert one.source.callers is other.source.callers


def test_calls_are_neither_printed_nor_compared() -> None:
    def step(state: Any, batch: Any) -> Any:
        return state, _act(batch * state).sum()

    program = captured(step, jnp.ones(3))
    bare = program.with_blocks(
        block.with_ops(replace(op, source=replace(op.source, callers=())) for op in block.ops)
        for block in program.blocks
    )
    assert any(op.source.callers for op in program.root.ops)
    assert bare == program
    assert print_program(bare, source=True) == print_program(program, source=True)
