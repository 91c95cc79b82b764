"""The interpreter runs blocks in order, and reports missing values."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfleet.errors import ProgramError
from jaxfleet.ir import Operator, OpTraits, ir_traits, op_traits, parse
from jaxfleet.ir.op_traits import HOST_OPS
from jaxfleet.ops import Array, Context, Interpreter, known_ops, register_op

HELD: list[set[str]] = []
_EFFECTS = (
    *("fetch", "cut", "delete_var", "to_host", "to_device", "table_lookup_grad"),
    *("c_gen_nccl_id", "c_comm_init", "c_comm_init_all", "gen_nccl_id"),
)
_REDUCTIONS = ("sum", "avg", "prod", "max", "min", "and", "or", "xor")
_COLLECTIVES = (
    *("c_allgather", "c_reducescatter", "c_broadcast", "c_alltoall"),
    *(f"c_allreduce_{name}" for name in _REDUCTIONS),
)


@register_op("test_ops.peek")
def peek(ctx: Context, op: Operator, inputs: Sequence[Array]) -> Sequence[Array]:
    """Runs its block on its inputs, and returns the block's results."""
    (ref,) = op.attrs.block_refs
    after = ctx.run_scope(ctx.program.blocks[ref.index], dict(zip(op.reads, inputs, strict=True)))
    HELD.append(set(after))
    return [after[name] for name in op.writes]


def run(text: str, **values: Any) -> dict[str, Array]:
    return Interpreter(parse(f"program p\n{text}"), {"b": 3}).run(values)


def test_state_holds_its_new_value_when_the_program_ends() -> None:
    after = run(
        """
  state s: f32[]
  block 0
    optimize
      s = jax.add(s, 1.0:f32)
      s = jax.mul(s, s)
""",
        s=2.0,
    )
    assert after["s"] == 9.0


def test_a_temporary_is_freed_behind_its_last_reader_unless_it_is_fetched() -> None:
    text = """
  data x: f32[b]
  block 0
    forward
      a: f32[b] = jax.sin(x)
      c: f32[b] = jax.cos(a)
      d: f32[b] = jax.cos(c)
      fetch(c)
"""
    assert set(run(text, x=np.ones(3, np.float32))) == {"x", "c"}
    program = parse(f"program p\n{text}")
    kept = Interpreter(program, {"b": 3}).run({"x": jnp.ones(3)}, keep=["a"])
    assert {"a", "c"} <= set(kept)


def test_a_letter_is_the_number_that_it_was_given() -> None:
    after = run(
        """
  data x: f32[b]
  state n: i32[]
  block 0
    forward
      n = jax.dim_value() {dim=<2*b+1>, dtype=i32}
""",
        x=np.ones(3),
        n=0,
    )
    assert after["n"] == 7


SCOPE = """
  state s: f32[]
  state t: f32[]
  block 0
    forward
      Out=s = test_ops.peek(X=[{inputs}]) {{sub_block=^1}}
  block 1
    forward
      own: f32[] = jax.add(s, t)
      s = jax.mul(own, 2.0:f32)
"""


def test_a_block_without_arguments_sees_what_its_operator_reads() -> None:
    HELD.clear()
    after = run(SCOPE.format(inputs="s, t"), s=1.0, t=2.0)
    assert after["s"] == 6.0
    (names,) = HELD
    assert names == {"s", "t"}


def test_what_a_block_reads_and_its_operator_does_not_list_is_named() -> None:
    with pytest.raises(ProgramError, match="'t' has no value") as caught:
        run(SCOPE.format(inputs="s"), s=1.0, t=2.0)
    notes = "\n".join(caught.value.__notes__)
    assert "op: own = jax.add(s, t)" in notes
    assert "lists among its inputs what its sub-block reads" in notes


def test_a_constant_that_is_only_known_by_its_digest_is_named() -> None:
    text = """
  const k: f32[2] = @c0123456789abcdef
  state s: f32[2]
  block 0
    forward
      s = jax.add(s, k)
"""
    with pytest.raises(ProgramError, match="constant 'k' has no value, only its digest"):
        run(text, s=np.ones(2))


def test_an_operator_that_fails_is_named_with_its_operands() -> None:
    text = """
  state s: f32[2]
  state t: f32[3]
  block 0
    forward
      s = jax.add(s, t)
"""
    with pytest.raises(ProgramError, match=r"jax\.add: ") as caught:
        run(text, s=np.ones(2, np.float32), t=np.ones(3, np.float32))
    assert "  op: s = jax.add(s, t)" in caught.value.__notes__


def test_an_operator_that_nobody_registered_is_named_with_its_neighbours() -> None:
    with pytest.raises(ProgramError, match="no operator type 'asign'") as caught:
        run("  state s: f32[]\n  block 0\n    forward\n      s = asign(s)\n", s=1.0)
    assert "did you mean assign" in caught.value.__notes__[-1]


def test_a_primitive_of_another_jax_line_is_named() -> None:
    with pytest.raises(ProgramError, match="makes no primitive 'frobnicate' public") as caught:
        run("  state s: f32[]\n  block 0\n    forward\n      s = jax.frobnicate(s)\n", s=1.0)
    assert "captured on another JAX line" in caught.value.__notes__[-1]


def test_every_operator_of_the_ir_has_a_meaning_and_declared_traits() -> None:
    modules = {name: op.meaning.__module__ for name, op in known_ops().items()}
    ours = {name for name, module in modules.items() if module.startswith("jaxfleet.ops.")}
    own = {name for name in ours if not modules[name].startswith("jaxfleet.ops.fluid.")}
    assert {name for name in own if not name.startswith("jax.")} == op_traits.IR_OPS


@pytest.mark.parametrize("name", [*HOST_OPS, *_EFFECTS])
def test_what_acts_beside_its_outputs_is_never_dead(name: str) -> None:
    assert ir_traits(name) == OpTraits(has_effect=True)


@pytest.mark.parametrize("name", _COLLECTIVES)
def test_what_all_devices_run_together_is_a_collective(name: str) -> None:
    assert ir_traits(name) == OpTraits(is_collective=True)


def test_the_traits_of_an_operator_of_the_ir_are_declared_in_one_place() -> None:
    with pytest.raises(ProgramError, match=r"'send' has its traits in jaxfleet\.ir\.op_traits"):
        register_op("send", is_collective=True)
    with pytest.raises(ProgramError, match=r"operators named jax\.\* have no effects"):
        register_op("jax.mine", has_effect=True)


def test_an_operator_type_is_registered_once() -> None:
    assert "test_ops.peek" in known_ops()
    with pytest.raises(ProgramError, match=r"'test_ops\.peek' is registered twice"):
        register_op("test_ops.peek")(peek)
