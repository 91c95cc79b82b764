"""Buckets of all-reduces."""

from collections import Counter
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfleet.errors import PassError
from jaxfleet.ir import Program, parse, verify
from jaxfleet.passes import FuseAllreduce
from jaxfleet.testing import check_pass
from tests.passes.drawn import Meaning, programs

HEAD = """
program p
  data  a: f32[256]
  data  b: f32[256]
  data  c: f32[256]
  data  half: bf16[256]
  data  rows: f32[b,4]
  data  odd: key<fry>[]
  param p: f32[256]
  param q: f32[256]
  block 0
    backward"""
KIB = 1024  # the size of a, of b and of c


def check(before: str, after: str, pass_: FuseAllreduce | None = None) -> None:
    """Checks the rewrite of these operators."""
    pass_ = pass_ or FuseAllreduce()
    check_pass(pass_, before=f"{HEAD}\n{before}", after=f"{HEAD}\n{after}")


def check_unchanged(ops: str, pass_: FuseAllreduce | None = None) -> None:
    """Checks that these operators stay unchanged."""
    check(ops, ops, pass_)


def test_neighbours_become_one_with_all_their_parameters() -> None:
    check(
        """
        a = c_allreduce_sum(a) {ring_id=0} for (p, a)
        b = c_allreduce_sum(b) {ring_id=0}
        c = c_allreduce_sum(c) {ring_id=0} for (q, c)
        """,
        "a, b, c = c_allreduce_sum(a, b, c) {flat=true, ring_id=0} for (p, a), (q, c)",
    )


def test_slots_stay_slots() -> None:
    check(
        """
        Out=a = c_allreduce_sum(X=a) {ring_id=0}
        Out=b = c_allreduce_sum(X=b) {ring_id=0}
        """,
        "Out=[a, b] = c_allreduce_sum(X=[a, b]) {flat=true, ring_id=0}",
    )


def test_operands_in_slots_and_bare_ones_do_not_mix() -> None:
    check_unchanged("""
        Out=a = c_allreduce_sum(X=a)
        b = c_allreduce_sum(b)
    """)


def test_arrays_can_be_reduced_as_a_tuple_instead_of_one_flat_array() -> None:
    check(
        "a = c_allreduce_sum(a)\n b = c_allreduce_sum(b)",
        "a, b = c_allreduce_sum(a, b)",
        FuseAllreduce(flat=False),
    )


@pytest.mark.parametrize(
    "ops",
    [
        "a = c_allreduce_sum(a) {ring_id=0}\n b = c_allreduce_sum(b) {ring_id=1}",
        "a = c_allreduce_sum(a)\n half = c_allreduce_sum(half)",
        "a = c_allreduce_sum(a)\n optimize\n b = c_allreduce_sum(b)",
        "a = c_allreduce_sum(a) {use_calc_stream=true}\n b = c_allreduce_sum(b)",
    ],
    ids=["ring", "dtype", "role", "attribute"],
)
def test_all_reduces_that_differ_stay_apart(ops: str) -> None:
    check_unchanged(ops)


@pytest.mark.parametrize("name", ["rows", "odd"])
def test_a_size_that_is_known_only_at_run_time_is_left_alone(name: str) -> None:
    check(
        f"a = c_allreduce_sum(a)\n {name} = c_allreduce_sum({name})\n b = c_allreduce_sum(b)",
        f"{name} = c_allreduce_sum({name})\n a, b = c_allreduce_sum(a, b) {{flat=true}}",
    )


def test_a_bucket_takes_the_place_of_its_last_member() -> None:
    check(
        """
        a = c_allreduce_sum(a)
        t: f32[256] = jax.add(b, c)
        b = c_allreduce_sum(b)
        u: f32[256] = jax.add(b, c)
        """,
        """
        t: f32[256] = jax.add(b, c)
        a, b = c_allreduce_sum(a, b) {flat=true}
        u: f32[256] = jax.add(b, c)
        """,
    )


@pytest.mark.parametrize(
    "between",
    [
        "t: f32[256] = jax.neg(r)",
        "r = jax.neg(c)",
        "a = jax.neg(c)",
        "jax.cond(c) {block=^1}",
        "fetch(c)",
        "send_barrier()",
    ],
    ids=[
        "reads an output",
        "writes an output",
        "writes an input",
        "has a block that reads an output",
        "has an effect",
        "is unknown",
    ],
)
def test_an_all_reduce_does_not_move_past_an_operator_that(between: str) -> None:
    block = "\n block 1\n backward\n t: f32[256] = jax.neg(r)" if "^1" in between else ""
    ops = f"r: f32[256] = c_allreduce_sum(a)\n {between}\n s: f32[256] = c_allreduce_sum(b)"
    check_unchanged(ops + block)


def test_an_all_reduce_of_an_all_reduce_stays_behind_it() -> None:
    check_unchanged("a = c_allreduce_sum(a)\n a = c_allreduce_sum(a)")


def test_two_rings_fill_their_buckets_side_by_side() -> None:
    check(
        """
        a = c_allreduce_sum(a) {ring_id=0}
        half = c_allreduce_sum(half) {ring_id=0}
        b = c_allreduce_sum(b) {ring_id=0}
        """,
        """
        half = c_allreduce_sum(half) {ring_id=0}
        a, b = c_allreduce_sum(a, b) {flat=true, ring_id=0}
        """,
    )


def test_a_full_bucket_is_followed_by_another() -> None:
    ops = "".join(f"{name} = c_allreduce_sum({name})\n" for name in "abc")
    two = "a, b = c_allreduce_sum(a, b) {flat=true}\n c = c_allreduce_sum(c)"
    check(ops, two, FuseAllreduce(bucket_size_bytes=2 * KIB))
    check(ops, two, FuseAllreduce(bucket_size_bytes=3 * KIB - 1))
    check_unchanged(ops, FuseAllreduce(bucket_size_bytes=2 * KIB - 1))


def test_all_reduces_in_a_sub_block_are_gathered_there() -> None:
    block = """
        fetch(a) {{block=^1}}
      block 1
        backward
          {ops}
    """
    before = block.format(ops="a = c_allreduce_sum(a)\n b = c_allreduce_sum(b)")
    check(before, block.format(ops="a, b = c_allreduce_sum(a, b) {flat=true}"))


def test_a_bucket_keeps_the_line_of_its_first_member_and_names_the_pass() -> None:
    program = parse(f"""{HEAD}
      a = c_allreduce_sum(a)  # model/train.py:7, in step
      b = c_allreduce_sum(b)  # model/train.py:9, in step
    """)
    (op,) = FuseAllreduce().run(program).root.ops
    assert op.source.comment() == "model/train.py:7, in step; by fuse_allreduce"


@pytest.mark.parametrize("size", [0, -1])
def test_a_bucket_has_room(size: int) -> None:
    with pytest.raises(PassError, match=f"bucket_size_bytes is {size}"):
        FuseAllreduce(bucket_size_bytes=size)


def test_large_ones_may_stay_by_themselves() -> None:
    ops = "a = c_allreduce_sum(a)\n half = c_allreduce_sum(half)\n b = c_allreduce_sum(b)"
    check_unchanged(ops, FuseAllreduce(largest_bytes=KIB - 1))
    check(
        ops,
        "half = c_allreduce_sum(half)\n a, b = c_allreduce_sum(a, b) {flat=true}",
        FuseAllreduce(largest_bytes=KIB),
    )
    with pytest.raises(PassError, match="largest_bytes is -1"):
        FuseAllreduce(largest_bytes=-1)


def test_metrics_and_gradients_may_share_a_bucket() -> None:
    check_pass(
        FuseAllreduce(across_roles=True),
        before=f"{HEAD}\n a = c_allreduce_sum(a)\n optimize\n b = c_allreduce_sum(b) for (p, b)",
        after=f"{HEAD.removesuffix('backward')}optimize\n"
        "a, b = c_allreduce_sum(a, b) {flat=true} for (p, b)",
    )


@given(programs(), st.sampled_from([1, 16, 32, 4096]))
def test_every_value_is_made_as_before(program: Program, bucket_size_bytes: int) -> None:
    after = FuseAllreduce(bucket_size_bytes=bucket_size_bytes).run(program)
    verify(after)
    meaning = Meaning()
    assert meaning.of(after) == meaning.of(program)


@given(programs(), st.sampled_from([16, 32, 64]))
def test_every_gradient_is_reduced_once_and_no_bucket_overflows(
    program: Program, bucket_size_bytes: int
) -> None:
    after = FuseAllreduce(bucket_size_bytes=bucket_size_bytes).run(program)
    assert _reduced(after) == _reduced(program)
    for op in after.root.ops:
        if op.type == "c_allreduce_sum" and len(op.inputs) > 1:
            shapes = [program.lookup(name).shape for name in op.reads]
            sizes = [4 * prod(size for size in shape if isinstance(size, int)) for shape in shapes]
            assert sum(sizes) <= bucket_size_bytes


def _reduced(program: Program) -> Counter[tuple[str, str]]:
    """Returns how often each output was reduced from each input."""
    return Counter(
        pair
        for op in program.root.ops
        if op.type == "c_allreduce_sum"
        for pair in zip(op.reads, op.writes, strict=True)
    )
