"""The repr in a debugger or notebook is one line, for programs of any size."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfleet as jf
from jaxfleet.errors import FeedError, ProgramError
from jaxfleet.ir import Operator, Program
from jaxfleet.runtime.simulated_job import TwinResult
from jaxfleet.runtime.step_state import Handle

TX = jf.distributed_optimizer(optax.adam(0.1))


def train_step(state: Any, batch: Any) -> tuple[Any, Any]:
    def loss_of(params: Any) -> jax.Array:
        return jnp.mean(jnp.square(batch["x"] @ params["w"]))

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def example() -> tuple[Any, Any]:
    params = {"w": jnp.ones((4, 3))}
    return {"params": params, "opt": TX.init(params)}, {"x": jnp.ones((8, 4))}


def test_what_a_step_hands_out_is_shown_in_one_short_line() -> None:
    step = jf.distribute(train_step, example(), jf.DistributedStrategy(devices=2))
    assert isinstance(step, jf.Step)
    shown = [repr(step.program), repr(step.dumps), repr(step.dumps["dce"]), repr(step)]
    shown += [repr(step.captured), repr(step.memory_report()), repr(step.program.root)]
    assert [text for text in shown if "\n" in text or len(text) > 160] == []
    assert repr(step.program).startswith("Program('train_step': ")
    assert repr(step.dumps).startswith("Record(input -> ")


def test_what_a_job_hands_out_is_shown_in_one_line() -> None:
    twin = jf.Twin(train_step, example(), servers=3, trainers=2)
    assert repr(twin) == "Twin('train_step', servers=3, trainers=2)"
    shown = repr(twin.programs())
    assert "\n" not in shown
    assert "train_step.pserver1" in shown
    assert shown.endswith(", and 1 more])")
    assert repr(TwinResult(({}, {}), ((1, 2), (1, 2)))) == "TwinResult(2 trainers, 2 steps)"


def test_a_table_and_a_handle_are_shown_in_one_line() -> None:
    assert repr(jf.embedding_table("users", 16)) == "EmbeddingTable('users', dim=16)"
    handle = Handle("opt/mu", (3,), np.dtype("f4"), "2 servers")
    assert repr(handle) == "<'opt/mu' float32[3] on 2 servers>"


@pytest.mark.parametrize("read", ["sum", "reshape", "item"])
def test_a_handle_says_where_its_value_is_to_methods_too(read: str) -> None:
    handle = Handle("opt/mu", (3,), np.dtype("f4"), "2 servers")
    with pytest.raises(FeedError, match="'opt/mu' lives on 2 servers and cannot be read here"):
        getattr(handle, read)()


def test_an_operator_takes_plain_attributes_and_operands() -> None:
    coerced = Operator("scale", inputs=["x"], outputs={"Out": ["y"]}, attrs={"by": 2})  # type: ignore[arg-type]
    assert str(coerced) == "Out=y = scale(x) {by=2}"
    assert hash(coerced) == hash(coerced)
    assert str(Program("p", attrs={"role": "trainer"})).startswith(  # type: ignore[arg-type]
        'program p {role="trainer"}'
    )


def test_a_lone_string_is_not_taken_for_a_list_of_letters() -> None:
    with pytest.raises(ProgramError, match="an operator's inputs cannot be 'xy'"):
        Operator("scale", inputs="xy")  # type: ignore[arg-type]
