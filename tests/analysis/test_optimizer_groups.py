"""Optimize groups: ownership of operators, shared values, and text."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxfleet.analysis.optimizer_groups import OptimizerGroups, RowLocality, find_optimizer_groups
from jaxfleet.capture import capture, distributed_optimizer
from jaxfleet.errors import ProgramError
from jaxfleet.ir import parse, verify
from tests.analysis.groups_steps import PARAMS, groups_of, step_of
from tests.zoo import ZOO

HEAD = """
program p
  data  x: f32[4]
  param v: f32[4]
  param w: f32[4]
  state mu: f32[4]
  state nu: f32[4]
  state count: i32[]
  block 0
    backward
      v@GRAD: f32[4] = jax.mul(x, v) for (v, v@GRAD)
      w@GRAD: f32[4] = jax.mul(x, w) for (w, w@GRAD)
    optimize"""


def groups(text: str) -> OptimizerGroups:
    """Returns the groups of a program's text after `HEAD`."""
    program = parse(HEAD + text)
    verify(program)
    found = find_optimizer_groups(program)
    for group in found.groups:
        verify(group.program)
    return found


def types(found: OptimizerGroups, places: tuple[int, ...]) -> list[str]:
    return [found.program.root.ops[place].type for place in places]


def test_a_group_holds_what_updates_its_parameter_and_its_state() -> None:
    found = groups("""
      count = jax.add(count, 1:i32)
      lr: f32[] = jax.convert_element_type(count) {new_dtype=f32}
      mu = jax.add(mu, v@GRAD)
      step: f32[4] = jax.mul(lr, mu)
      v = jax.sub(v, step)
      w = jax.sub(w, w@GRAD)
    """)
    v, w = found.groups
    assert types(found, v.ops) == ["jax.add", "jax.mul", "jax.sub"]
    assert (v.gradients, v.state, v.shared) == (("v@GRAD",), ("mu",), ("lr",))
    assert (w.gradients, w.state, w.shared) == (("w@GRAD",), (), ())
    assert types(found, found.lr_ops) == ["jax.add", "jax.convert_element_type"]
    assert found.lr_state == ("count",)
    assert found.other_ops == ()


def test_the_text_has_a_line_for_each_parameter_and_then_the_reasons() -> None:
    found = groups("""
      count = jax.add(count, 1:i32)
      squares: f32[4] = jax.square(w@GRAD)
      norm: f32[] = jax.reduce_sum(squares) {axes=[0]}
      scaled: f32[4] = jax.div(w@GRAD, norm)
      mu = jax.add(mu, v@GRAD)
      v = jax.sub(v, mu)
      w = jax.sub(w, scaled)
    """)
    assert str(found) == (
        "optimize groups of p: 2 parameters\n"
        "  v  f32[4]  separable  row-local     2 operators, state mu\n"
        "  w  f32[4]  separable  row-reducing  4 operators\n"
        "  learning-rate block: 1 operator, state count\n"
        "  w: row-reducing: reduces its rows by jax.reduce_sum\n"
        "    norm = jax.reduce_sum(squares) {axes=[0]}"
    )


def test_a_parameter_that_reads_another_ones_gradient_crosses() -> None:
    found = groups("""
      v = jax.sub(v, w@GRAD)
      w = jax.sub(w, w@GRAD)
    """)
    v, w = found.groups
    assert (v.others, w.others) == (("w",), ())
    assert v.crossing is not None
    assert v.crossing.op is not None
    assert v.crossing.op.type == "jax.sub"
    assert "v and w" in v.crossing.text
    assert w.is_separable
    assert v.rows is RowLocality.WHOLE


def test_a_parameter_that_reads_another_ones_new_value_crosses() -> None:
    found = groups("""
      w = jax.sub(w, w@GRAD)
      v = jax.sub(v, w)
    """)
    assert [group.is_separable for group in found.groups] == [False, True]


def test_reductions_fall_apart_into_parts_a_combination_and_the_rest() -> None:
    found = groups("""
      sv: f32[] = jax.reduce_sum(v@GRAD) {axes=[0]}
      sw: f32[] = jax.reduce_sum(w@GRAD) {axes=[0]}
      both: f32[] = jax.add(sv, sw)
      dv: f32[4] = jax.mul(v@GRAD, both)
      dw: f32[4] = jax.mul(w@GRAD, both)
      v = jax.sub(v, dv)
      w = jax.sub(w, dw)
    """)
    assert types(found, found.crossing_ops) == ["jax.add"]
    for group in found.groups:
        assert types(found, group.ops) == ["jax.reduce_sum", "jax.mul", "jax.sub"]
        assert group.shared == ("both",)
        assert group.program.root.ops[-1].type == "fetch"  # of its part
        assert group.rows is RowLocality.REDUCING


def test_metrics_of_the_optimizer_belong_to_no_group_and_cross_nothing() -> None:
    found = groups("""
      sv: f32[] = jax.reduce_sum(v@GRAD) {axes=[0]}
      sw: f32[] = jax.reduce_sum(w@GRAD) {axes=[0]}
      both: f32[] = jax.add(sv, sw)
      v = jax.sub(v, v@GRAD)
      w = jax.sub(w, w@GRAD)
      fetch(both)
    """)
    assert types(found, found.other_ops) == ["jax.reduce_sum", "jax.reduce_sum", "jax.add", "fetch"]
    assert found.crossing_ops == ()
    assert all(group.is_separable and group.rows is RowLocality.LOCAL for group in found.groups)


def test_state_made_of_several_parameters_is_nobodys() -> None:
    found = groups("""
      both: f32[4] = jax.add(v@GRAD, w@GRAD)
      mu = jax.add(mu, both)
      v = jax.sub(v, v@GRAD)
      w = jax.sub(w, w@GRAD)
    """)
    assert found.crossing_state == ("mu",)
    assert types(found, found.crossing_ops) == ["jax.add", "jax.add"]
    assert all(group.is_separable for group in found.groups)


def test_an_average_of_a_parameter_is_its_own_though_no_update_reads_it() -> None:
    found = groups("""
      v = jax.sub(v, v@GRAD)
      half: f32[4] = jax.mul(0.5:f32, v)
      mu = jax.add(mu, half)
      w = jax.sub(w, w@GRAD)
    """)
    assert found.group("v").state == ("mu",)
    assert types(found, found.group("v").ops) == ["jax.sub", "jax.mul", "jax.add"]


def test_an_array_of_no_parameter_is_made_by_every_group_that_reads_it() -> None:
    found = groups("""
      lr: f32[] = jax.convert_element_type(count) {new_dtype=f32}
      rate: f32[4] = jax.broadcast_in_dim(lr) {broadcast_dimensions=[], shape=[4]}
      dv: f32[4] = jax.mul(rate, v@GRAD)
      dw: f32[4] = jax.mul(rate, w@GRAD)
      v = jax.sub(v, dv)
      w = jax.sub(w, dw)
    """)
    assert types(found, found.lr_ops) == ["jax.convert_element_type"]
    for group in found.groups:
        assert types(found, group.ops) == ["jax.broadcast_in_dim", "jax.mul", "jax.sub"]
        assert group.rows is RowLocality.LOCAL


def test_a_group_that_reads_a_counter_before_and_after_has_two_names_for_it() -> None:
    found = groups("""
      old: f32[4] = jax.broadcast_in_dim(count) {broadcast_dimensions=[], shape=[4]}
      count = jax.add(count, 1:i32)
      new: f32[4] = jax.broadcast_in_dim(count) {broadcast_dimensions=[], shape=[4]}
      ratio: f32[4] = jax.div(old, new)
      dv: f32[4] = jax.mul(ratio, v@GRAD)
      v = jax.sub(v, dv)
      w = jax.sub(w, w@GRAD)
    """)
    assert found.group("v").shared == ("count", "count~1")
    assert found.lr_state == ("count",)


def test_an_operator_that_is_not_known_keeps_the_parameter_whole() -> None:
    found = groups("""
      d: f32[4] = mystery(v@GRAD, count)
      v = jax.sub(v, d)
      w = jax.sub(w, w@GRAD)
    """)
    v, w = found.groups
    assert v.rows is RowLocality.WHOLE
    assert v.reason is not None
    assert v.reason.text == "needs all of its rows in mystery"
    assert w.rows is RowLocality.LOCAL


def test_an_operator_in_place_of_a_group_is_kept_whole_like_any_other() -> None:
    found = groups("""
      v = sgd(v, v@GRAD, count)
      w = jax.sub(w, w@GRAD)
    """)
    assert found.group("v").is_separable
    assert found.group("v").rows is RowLocality.WHOLE


def test_a_parameter_that_nothing_updates_has_an_empty_group() -> None:
    found = groups("""
      w = jax.sub(w, w@GRAD)
    """)
    assert found.group("v").ops == ()
    assert found.group("v").is_separable


def test_a_parameter_that_is_updated_from_data_alone_crosses_and_is_kept_whole() -> None:
    found = groups("""
      w = jax.sub(w, w@GRAD)
    forward
      v = jax.sub(v, x)
    """)
    v = found.group("v")
    assert v.crossing is not None
    assert "outside the optimize section" in v.crossing.text
    assert v.rows is RowLocality.WHOLE


def test_asking_for_another_name_says_what_there_is() -> None:
    with pytest.raises(ProgramError, match="'u' is not a parameter of 'p'") as error:
        groups("""
      w = jax.sub(w, w@GRAD)
    """).group("u")
    assert "v, w" in "".join(error.value.__notes__)


def test_both_optimizers_of_a_gan_have_their_groups() -> None:
    built = ZOO["gan"].build(distributed_optimizer)
    step = capture(built.train_step, example=(built.state, built.batch(0, ZOO["gan"].rows)))
    found = find_optimizer_groups(step.program)
    judge, maker = found.group("judge/params/fc0/w"), found.group("make/params/fc0/w")
    assert judge.state == ("judge/opt_state/0/nu/fc0/w",)
    assert len(maker.state) == 2
    for group in (judge, maker):
        assert group.ops
        assert group.is_separable
        assert group.rows is RowLocality.LOCAL
        assert len(group.gradients) == 1


def test_a_schedule_that_a_metric_shows_is_fed_to_the_groups() -> None:
    wrapped = distributed_optimizer(optax.sgd(1.0))

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        rate = 0.1 / (1.0 + state["count"])
        value, grads = jax.value_and_grad(lambda p: optax.tree.norm(p) * batch.mean())(state["p"])
        updates, opt = wrapped.update(grads, state["opt"], state["p"])
        updates = jax.tree.map(lambda u: rate * u, updates)
        new = {"p": optax.apply_updates(state["p"], updates), "opt": opt}
        return {**new, "count": state["count"] + 1}, {"loss": value, "rate": rate}

    state = {"p": PARAMS, "opt": wrapped.init(PARAMS), "count": np.float32(0)}
    found = find_optimizer_groups(capture(step, example=(state, jnp.ones(8))).program)
    for group in found.groups:
        assert group.shared == ("metrics/rate",)
        assert group.is_separable
        assert group.rows is RowLocality.LOCAL


def test_hyperparameters_and_counters_are_of_the_learning_rate_block() -> None:
    schedule = optax.cosine_decay_schedule(0.1, 10)
    found = groups_of(optax.inject_hyperparams(optax.adam)(learning_rate=schedule))
    assert "opt/hyperparams/learning_rate" in found.lr_state
    assert {name.rpartition("/")[2] for name in found.lr_state} >= {"count", "learning_rate"}
    for group in found.groups:
        assert {name.split("/")[-2] for name in group.state} == {"mu", "nu"}


def test_many_names_are_cut_short() -> None:
    params = {f"w{i}": np.ones((2, 2), np.float32) for i in range(9)}
    text = str(groups_of(optax.lamb(0.1), params))
    assert "optimize groups of step: 9 parameters" in text
    assert "params/w0, params/w1, params/w2, params/w3 and 5 more: row-reducing: reduces" in text
    clipped = str(groups_of(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), params))
    assert "params/w0, params/w1, params/w2, params/w3 and 5 more: crosses:" in clipped


def test_passes_that_ask_about_one_program_share_the_answer() -> None:
    program = step_of(optax.adam(0.1))
    assert find_optimizer_groups(program) is find_optimizer_groups(program)
    same = replace(program)
    assert find_optimizer_groups(same) is not find_optimizer_groups(program)
