"""Dead-code elimination."""

from hypothesis import given

from jaxfleet.ir import Kind, Program, parse, verify
from jaxfleet.passes import DeadCodeElimination
from jaxfleet.testing import check_pass
from tests.passes.drawn import Meaning, programs

HEAD = """
program p
  data  x: f32[4]
  param w: f32[4]
  block 0
    forward"""


def dce(text: str) -> Program:
    """Returns a program after dead-code elimination."""
    return DeadCodeElimination().run(parse(text))


def test_a_chain_that_ends_nowhere_goes_from_its_end() -> None:
    before = f"""{HEAD}
      a: f32[4] = jax.add(x, x)
      b: f32[4] = jax.add(a, x)
      c: f32[4] = jax.add(b, a)
    """
    check_pass(DeadCodeElimination(), before=before, after=HEAD.removesuffix("forward"))


def test_a_write_that_is_overwritten_before_it_is_read_goes() -> None:
    before = f"""{HEAD}
      w = jax.add(x, x)
      w = jax.mul(x, x)
    """
    after = f"""{HEAD}
      w = jax.mul(x, x)
    """
    check_pass(DeadCodeElimination(), before=before, after=after)


def test_a_write_that_the_next_update_reads_stays() -> None:
    program = f"""{HEAD}
      w = jax.add(w, x)
      w = jax.mul(w, x)
    """
    check_pass(DeadCodeElimination(), before=program, after=program)


def test_one_needed_output_keeps_an_operator_with_all_its_outputs() -> None:
    program = f"""{HEAD}
      values: f32[4], places: i32[4] = jax.sort(x, x)
      fetch(values)
    """
    check_pass(DeadCodeElimination(), before=program, after=program)


def test_an_operator_of_an_unknown_type_stays_with_what_it_reads() -> None:
    program = f"""{HEAD}
      a: f32[4] = jax.add(x, x)
      nobody_knows_this(a)
    """
    check_pass(DeadCodeElimination(), before=program, after=program)


def test_a_collective_stays_though_nobody_reads_it() -> None:
    program = f"""{HEAD}
      a: f32[4] = jax.add(x, x)
      b: f32[4] = c_allreduce_sum(a)
    """
    check_pass(DeadCodeElimination(), before=program, after=program)


def test_what_a_fetched_variable_holds_at_the_end_is_needed() -> None:
    program = f"""{HEAD}
      a: f32[4] = jax.add(x, x)
      fetch(a)
      a = jax.mul(x, x)
    """
    check_pass(DeadCodeElimination(), before=program, after=program)


def test_variables_that_are_fetched_by_name_can_be_kept() -> None:
    program = f"""{HEAD}
      a: f32[4] = jax.add(x, x)
      b: f32[4] = jax.mul(x, x)
    """
    kept = f"""{HEAD}
      a: f32[4] = jax.add(x, x)
    """
    check_pass(DeadCodeElimination(keep=("a",)), before=program, after=kept)


def test_data_parameters_and_state_stay_declared_though_unused() -> None:
    program = """
    program p
      data  x: f32[4]
      param w: f32[4]
      state m: f32[4]
      block 0
    """
    check_pass(DeadCodeElimination(), before=program, after=program)


def test_a_dead_operator_in_a_function_goes_and_its_results_stay() -> None:
    before = f"""{HEAD}
      w = jax.scan(w, x) {{body=^1}}
  block 1 (c: f32[4], v: f32[4]) -> (d)
    forward
      dead: f32[4] = jax.mul(c, v)
      d: f32[4] = jax.add(c, v)
    """
    after = f"""{HEAD}
      w = jax.scan(w, x) {{body=^1}}
  block 1 (c: f32[4], v: f32[4]) -> (d)
    forward
      d: f32[4] = jax.add(c, v)
    """
    check_pass(DeadCodeElimination(), before=before, after=after)


def test_what_a_function_reads_of_the_blocks_around_it_is_needed() -> None:
    program = f"""{HEAD}
      a: f32[4] = jax.add(x, x)
      w = jax.scan(w) {{body=^1}}
  block 1 (c: f32[4]) -> (d)
    forward
      d: f32[4] = jax.add(c, a)
    """
    check_pass(DeadCodeElimination(), before=program, after=program)


def test_what_only_a_dead_operator_of_a_function_reads_is_not_needed() -> None:
    before = f"""{HEAD}
      a: f32[4] = jax.add(x, x)
      w = jax.scan(w) {{body=^1}}
  block 1 (c: f32[4]) -> (d)
    forward
      dead: f32[4] = jax.add(c, a)
      d: f32[4] = jax.add(c, c)
    """
    after = f"""{HEAD}
      w = jax.scan(w) {{body=^1}}
  block 1 (c: f32[4]) -> (d)
    forward
      d: f32[4] = jax.add(c, c)
    """
    check_pass(DeadCodeElimination(), before=before, after=after)


def test_blocks_of_dead_operators_go_and_the_others_are_renumbered() -> None:
    before = f"""{HEAD}
      dead: f32[4] = jax.scan(x) {{body=^1}}
      w = jax.cond(x, w) {{branches=[^3, ^4]}}
  block 1 (a: f32[4]) -> (b)
    forward
      b: f32[4] = jax.scan(a) {{body=^2}}
  block 2 in 1 (c: f32[4]) -> (c)
  block 3 (d: f32[4]) -> (e)
    forward
      e: f32[4] = jax.neg(d)
  block 4 (f: f32[4]) -> (g)
    forward
      g: f32[4] = jax.scan(f) {{inner=struct{{body=^5}}}}
  block 5 in 4 (h: f32[4]) -> (h)
    """
    after = f"""{HEAD}
      w = jax.cond(x, w) {{branches=[^1, ^2]}}
  block 1 (d: f32[4]) -> (e)
    forward
      e: f32[4] = jax.neg(d)
  block 2 (f: f32[4]) -> (g)
    forward
      g: f32[4] = jax.scan(f) {{inner=struct{{body=^3}}}}
  block 3 in 2 (h: f32[4]) -> (h)
    """
    check_pass(DeadCodeElimination(), before=before, after=after)


def test_an_operator_whose_block_has_an_effect_stays() -> None:
    program = f"""{HEAD}
      unread: f32[4] = jax.scan(x) {{body=^1}}
  block 1 (a: f32[4]) -> (b)
    forward
      b: f32[4] = jax.scan(a) {{body=^2}}
  block 2 in 1 (c: f32[4]) -> (c)
    forward
      tell_the_world(c)
    """
    check_pass(DeadCodeElimination(), before=program, after=program)


def test_a_block_that_is_no_function_keeps_its_writes_to_the_blocks_around_it() -> None:
    program = f"""{HEAD}
      t: f32[4] = jax.neg(x)
      jax.cond(x) {{block=^1}}
      w = jax.add(w, t)
  block 1
    forward
      t = jax.add(x, x)
    """
    check_pass(DeadCodeElimination(), before=program, after=program)


def test_what_a_loop_wrote_late_and_reads_early_stays() -> None:
    program = f"""{HEAD}
      jax.while(x) {{block=^1}}
  block 1
    temp  carried: f32[4]
    forward
      w = jax.add(w, carried)
      carried = jax.add(x, x)
      dead: f32[4] = jax.add(x, x)
    """
    after = program.replace("      dead: f32[4] = jax.add(x, x)\n", "")
    check_pass(DeadCodeElimination(), before=program, after=after)


def test_a_temporary_that_only_an_inner_block_names_stays_declared() -> None:
    program = f"""{HEAD}
      jax.cond(x) {{block=^1}}
  block 1
    temp  t: f32[4]
    forward
      jax.cond(x) {{block=^2}}
  block 2 in 1
    forward
      t = jax.add(x, x)
    """
    check_pass(DeadCodeElimination(), before=program, after=program)


def test_a_program_without_dead_code_is_returned_itself() -> None:
    program = parse(f"{HEAD}\n      w = jax.add(w, x)\n")
    assert DeadCodeElimination().run(program) is program


@given(programs())
def test_what_is_left_leaves_the_same_state_and_fetches_the_same(program: Program) -> None:
    after = DeadCodeElimination().run(program)
    verify(after)
    meaning = Meaning()
    values, fetched = meaning.of(program)
    left, fetched_of_left = meaning.of(after)
    persistable = [v.name for v in program.of_kind(Kind.PARAM, Kind.STATE)]
    assert [left[name] for name in persistable] == [values[name] for name in persistable]
    assert fetched_of_left == fetched


@given(programs())
def test_a_second_run_finds_nothing_more(program: Program) -> None:
    after = DeadCodeElimination().run(program)
    assert DeadCodeElimination().run(after) is after
