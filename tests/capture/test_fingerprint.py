"""Equal fingerprints mean equal computations, for any names, order and dead operators."""

from jaxfleet.analysis.fingerprint import Numbering
from jaxfleet.ir import Program, parse

HEAD = """
program p
  data  x: f32[b,4]
  state s: f32[]
  block 0
    forward
"""


def program(*lines: str) -> Program:
    return parse(HEAD + "\n".join(f"      {line}" for line in lines))


def same(left: Program, right: Program, name: str = "s", **sizes: int) -> bool:
    numbering = Numbering(sizes)
    return numbering.of(left)[name] == numbering.of(right)[name]


TOTAL = "t: f32[] = jax.reduce_sum(x) {axes=[0, 1]}"


def test_names_and_dead_operators_do_not_count() -> None:
    left = program(TOTAL, "s = jax.mul(t, s)")
    right = program(
        "dead: f32[] = jax.sin(s)", TOTAL.replace("t:", "total:"), "s = jax.mul(total, s)"
    )
    assert same(left, right)


def test_order_does_not_count() -> None:
    sine, cosine = "p: f32[] = jax.sin(s)", "q: f32[] = jax.cos(s)"
    end = "s = jax.add(p, q)"
    assert same(program(sine, cosine, end), program(cosine, sine, end))


def test_operands_attributes_and_types_count() -> None:
    base = program(TOTAL, "s = jax.sub(t, s)")
    assert not same(base, program(TOTAL, "s = jax.sub(s, t)"))
    assert not same(base, program(TOTAL, "s = jax.add(t, s)"))
    assert not same(base, program(TOTAL.replace("0, 1", "1, 0"), "s = jax.sub(t, s)"))
    assert not same(base, program(TOTAL, "s = jax.sub(t, 1.0:f32)"))


def test_an_update_in_place_is_not_what_was_there_before() -> None:
    left = program("s = jax.sin(s)", "s = jax.sin(s)")
    assert not same(left, program("s = jax.sin(s)"))
    assert same(left, program("t: f32[] = jax.sin(s)", "s = jax.sin(t)"))


def test_a_letter_becomes_a_number() -> None:
    lettered = program(
        "n: i32[] = jax.dim_value() {dim=<b>, dtype=i32}",
        "m: f32[] = jax.convert_element_type(n) {new_dtype=f32, weak_type=false}",
        "r: f32[] = jax.div(1.0:f32, m)",
        "s = jax.mul(s, r)",
    )
    numbered = program("s = jax.mul(s, 0.25:f32)")
    assert same(lettered, numbered, b=4)
    assert not same(lettered, numbered, b=5)
    assert not same(lettered, numbered)


def test_sizes_in_attributes_become_numbers() -> None:
    line = "y: f32[{0},2] = jax.broadcast_in_dim(s) {{broadcast_dimensions=[], shape=[{1}, 2]}}"
    end = "s = jax.reduce_sum(y) {axes=[0, 1]}"
    left, right = (program(line.format(*size), end) for size in (("b", "<b>"), ("6", "6")))
    assert same(left, right, b=6)
    assert not same(left, right, b=7)


def with_blocks(call: str, *blocks: str) -> Program:
    return parse(HEAD + f"      {call}\n" + "\n".join(blocks))


SINE = """  block {0} (a: f32[]) -> (r)
    forward
      r: f32[] = jax.sin(a)
"""


def test_a_recomputation_computes_what_its_block_computes() -> None:
    call = "s = jax.remat2(s) {body=^1, differentiated=true, prevent_cse=true}"
    assert same(with_blocks(call, SINE.format(1)), program("s = jax.sin(s)"))


COND = "s = jax.cond({0}, s) {{branches=[^1, ^2]}}"
DOUBLE = """  block {0} (a: f32[]{1}) -> (r)
    forward
      r: f32[] = jax.add(a, a)
"""


def test_the_branches_of_a_choice_are_told_apart() -> None:
    pick = with_blocks(COND.format("0:i32"), SINE.format(1), DOUBLE.format(2, ""))
    swapped = with_blocks(COND.format("0:i32"), DOUBLE.format(1, ""), SINE.format(2))
    assert same(pick, pick)
    assert not same(pick, swapped)


CHOICES = """
program p
  data  x: i32[]
  state s: f32[]
  block 0
    forward
      {0} = jax.cond(x, s) {{branches=[^1, ^2]}}
      s = jax.cond({1}) {{branches=[^3, ^4]}}
  block 1 (a: f32[]) -> ({2})
    forward
      p: f32[] = jax.sin(a)
      q: f32[] = jax.cos(a)
  block 2 (b: f32[]) -> ({3})
    forward
      e: f32[] = jax.empty2()
  block 3 ({4}) -> (f)
    forward
      f: f32[] = jax.mul({5})
  block 4 ({4}) -> (g)
    forward
      g: f32[] = jax.neg({6})
"""


def test_what_only_one_branch_keeps_for_its_gradient_does_not_count() -> None:
    few = ("k: f32[]", "x, k", "q", "b", "c: f32[]", "c, 2.0:f32", "c")
    more = (
        "k: f32[], n: f32[]",
        "x, k, n",
        "q, 2.0:f32",
        "b, e",
        "c: f32[], d: f32[]",
        "c, d",
        "c",
    )
    swapped = (*more[:-1], "d")
    left = parse(CHOICES.format(*few))
    assert same(left, parse(CHOICES.format(*more)))
    assert not same(left, parse(CHOICES.format(*swapped)))
    by_another = CHOICES.format("k: f32[]", "0:i32, k", *few[2:])
    assert not same(left, parse(by_another))


SCAN = """      s{more_out} = jax.scan({inputs}) {{body=^1, num_consts={consts}, FACTS}}
  block 1 ({args}c: f32[]) -> (r{more})
    forward
      r: f32[] = jax.mul(c, {factor})
"""


def scan(**parts: str) -> Program:
    defaults = {"more_out": "", "inputs": "s", "consts": "0", "args": "", "more": "", "factor": ""}
    facts = "length=3, num_carry=1, reverse=false"
    return parse(HEAD + SCAN.replace("FACTS", facts).format(**{**defaults, **parts}))


def test_what_a_loop_gets_from_outside_may_stand_inside() -> None:
    inside = scan(factor="2.0:f32")
    outside = scan(inputs="2.0:f32, s", consts="1", args="k: f32[], ", factor="k")
    assert same(inside, outside)
    assert not same(inside, scan(factor="3.0:f32"))


def test_what_a_loop_makes_besides_does_not_count() -> None:
    assert same(scan(factor="2.0:f32"), scan(more_out=", y: f32[3]", more=", c", factor="2.0:f32"))


def test_the_same_loop_the_other_way_round_is_another() -> None:
    text = str(scan(factor="2.0:f32"))
    assert not same(parse(text), parse(text.replace("reverse=false", "reverse=true")))
