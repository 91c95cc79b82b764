"""Programs as text: the printed form round-trips, and follows the house style."""

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfleet.errors import TextError
from jaxfleet.ir import (
    Attrs,
    Block,
    Constant,
    Kind,
    Literal,
    Operands,
    Operator,
    Program,
    Source,
    Struct,
    Variable,
    letter,
    parse,
    parse_all,
    print_operator,
    print_program,
    verify,
)
from jaxfleet.testing.programs import programs, valid_programs
from tests.drawing import at_most
from tests.ir.timing import seconds

MLP = """
program mlp
  data  x: f32[b,784]
  data  label: i32[b]
  param fc1.w: f32[784,128]
  param fc1.b: f32[128]
  state lr: f32[]
  block 0
    forward
      h: f32[b,128] = fc(x, fc1.w, fc1.b) {act="relu"}
      loss: f32[] = softmax_xent(h, label) {reduce="mean"}
    backward
      h@GRAD: f32[b,128] = softmax_xent_grad(h, label) {reduce="mean"}
      fc1.w@GRAD: f32[784,128], fc1.b@GRAD: f32[128] = fc_grad(x, fc1.w, h@GRAD, h) {act="relu"}
    optimize
      fc1.w = sgd(fc1.w, fc1.w@GRAD, lr) for (fc1.w, fc1.w@GRAD)
      fc1.b = sgd(fc1.b, fc1.b@GRAD, lr) for (fc1.b, fc1.b@GRAD)
""".strip()

PSERVER = """
program mlp.pserver0 {role="pserver"}
  data  fc1.w@GRAD.block0: f32[392,128]
  param fc1.w.block0: f32[392,128]
  state lr: f32[]
  block 0
    rpc
      listen_and_serv() {endpoint="ps0:6174", optimize=[^1], sync=true, trainers=2}
  block 1
    lr_sched
      Out=step: f32[] = increment(X=lr) {by=0.5}
    optimize
      fc1.w@GRAD.block0 = scale(fc1.w@GRAD.block0) {by=0.5}
      ParamOut=fc1.w.block0 = sgd(Param=fc1.w.block0, Grad=fc1.w@GRAD.block0, Lr=[lr, step])
""".strip()

LOOP = """
program loop
  data  xs: f32[t,b,4]
  state h: f32[b,4]
  const c: f32[2] = [0.1, nan]
  const table: f32[1000,16] = @c0123456789abcdef
  block 0
    temp  outer: f32[b,4]
    forward
      seed: key<fry>[] = jax.random_seed(0:u32) {impl=fry}
      h, hs: f32[t,b,4] = jax.scan(h, xs) {body=^1, length=<t>, reverse=false}
      conditional(h) {block=^3}
  block 1 (carry: f32[b,4], x: f32[b,4]) -> (y, y)
    forward
      y: f32[b,4] = jax.while(carry, x) {body=^2}
  block 2 in 1 (i: i32[]) -> (true:bool)
  block 3
    forward
      outer = jax.mul(h, -0.0:f32)
      jax.add(outer, 1.0+-2.5i:c64) {axes=[], dims=Dims{lhs=[0], rhs=<floordiv(b,2)>}, fill=-inf}
""".strip()


@at_most(1000)
@given(programs(max_ops=3))
def test_any_program_parses_back_from_its_text(program: Program) -> None:
    text = print_program(program)
    assert parse(text) == program
    assert print_program(parse(text)) == text
    assert parse(print_program(program, source=True)) == program


@at_most(1000)
@given(valid_programs())
def test_a_valid_program_parses_back_and_is_valid(program: Program) -> None:
    verify(program)
    back = parse(print_program(program, source=True))
    assert back == program
    verify(back)


@at_most(300)
@given(valid_programs())
def test_printing_what_was_parsed_gives_the_same_text(program: Program) -> None:
    for source in (False, True):
        text = print_program(program, source=source)
        assert print_program(parse(text), source=source) == text


@pytest.mark.parametrize("text", [MLP, PSERVER, LOOP])
def test_a_program_prints_as_it_was_written(text: str) -> None:
    assert print_program(parse(text)) == text


def test_a_text_with_several_programs_gives_them_in_order() -> None:
    assert [p.name for p in parse_all(f"{MLP}\n\n{PSERVER}\n")] == ["mlp", "mlp.pserver0"]


def test_comments_indentation_and_empty_lines_mean_nothing() -> None:
    loose = "# a program\n\n" + MLP.replace("\n", "   # says something\r\n\n  ")
    assert parse(loose) == parse(MLP)
    assert parse(MLP.replace("  ", " ")) == parse(MLP)


def test_source_lines_come_back_from_their_comments() -> None:
    source = Source("models/train.py", 14, "<lambda>", "CNN/Conv_0", "grad_allreduce")
    for shown in (source, replace(source, file="", line=0, function=""), Source(made_by="dce")):
        program = Program(blocks=(Block(ops=(Operator("f", source=shown),)),))
        assert parse(print_program(program, source=True)).root.ops[0].source == shown


def test_a_source_line_prints_on_one_line_whatever_its_names_are() -> None:
    odd = Source("a\nb.py", 1, "f\r\n# x", "s\u2028t")
    program = Program(blocks=(Block(ops=(Operator("f", source=odd),)),))
    text = print_program(program, source=True)
    assert text.splitlines()[-1] == "      f()  # a b.py:1, in f # x; at s t"
    assert parse(text) == program


def test_a_comment_that_is_no_source_line_is_left_out() -> None:
    program = parse("program p\n  block 0\n    rpc\n      f()  # sends what was merged")
    assert program.root.ops[0].source == Source()


@pytest.mark.parametrize("keyword", ["program", "block", "data", "param", "forward", "for", "in"])
def test_a_keyword_can_name_anything(keyword: str) -> None:
    variable = Variable(keyword, "f32", (2,))
    op = Operator(
        keyword,
        Operands([(keyword, (keyword,))]),
        Operands.of(keyword),
        Attrs({keyword: Struct(keyword, Attrs({keyword: keyword}))}),
        role_var=((keyword, keyword),),
    )
    block = Block(variables={keyword: variable}, ops=(op, replace(op, outputs=Operands())))
    program = Program(keyword, {"x": Variable("x", "f32", (), Kind.DATA)}, (block,))
    assert parse(print_program(program)) == program


def test_a_hash_in_a_string_starts_no_comment() -> None:
    program = parse('program p\n  block 0\n    rpc\n      send("a # b") {endpoint="#1"}  # by hand')
    (op,) = program.root.ops
    assert op.reads == ("a # b",)
    assert op.attrs == Attrs({"endpoint": "#1"})
    assert op.source.made_by == "hand"


def test_a_variable_that_is_more_than_its_type_is_declared_on_its_own_line() -> None:
    pinned = Variable("w", "f32", (2,), Kind.TEMP, Constant("c1"))
    op = Operator("f", Operands.of(), Operands.of("w"))
    program = Program(blocks=(Block(variables={"w": pinned}, args=("w",), ops=(op,)),))
    text = print_program(program)
    assert "temp  w: f32[2] = @c1" in text
    assert parse(text) == program


def test_an_operator_prints_on_its_own_with_the_types_of_what_it_declares() -> None:
    block = parse(MLP).root
    assert print_operator(block.ops[1]) == 'loss = softmax_xent(h, label) {reduce="mean"}'
    assert print_operator(block.ops[1], declared=block).startswith("loss: f32[] = softmax_xent(")


def test_literals_keep_the_sign_of_zero_and_both_parts_of_a_complex_number() -> None:
    text = "program p\n  block 0\n    forward\n      f(-0.0:f32, nan:f32, 1e-05+-2e+16i:c64)"
    zero, nan, number = (x for x in parse(text).root.ops[0].inputs if isinstance(x, Literal))
    assert str(zero.value) == "-0.0"
    assert nan == Literal.of(float("nan"), "f32")
    assert number.value == complex(1e-5, -2e16)


def test_an_odd_dtype_is_quoted() -> None:
    variable = Variable("x", "my type[3]", (letter("b"),))
    assert str(variable) == 'x: "my type[3]"[b]'
    assert parse(print_program(Program(variables={"x": variable}))).variables["x"] == variable


@pytest.mark.grid
def test_ten_thousand_operators_print_and_parse_in_a_moment() -> None:
    names = ["x", *(f"t{index}" for index in range(10_000))]
    ops = tuple(
        Operator("jax.add", Operands.of(x, Literal("1.0", "f32")), Operands.of(y), Attrs({"a": 1}))
        for x, y in pairwise(names)
    )
    variables = {name: Variable(name, "f32", (letter("b"), 128)) for name in names}
    program = Program(blocks=(Block(variables=variables, ops=ops),))
    assert parse(print_program(program)) == program
    # 0.5 on the development machine
    assert seconds(lambda: parse(print_program(program)) == program) < 2.0


@at_most(500)
@given(
    st.sampled_from((MLP, PSERVER, LOOP)),
    st.integers(0, len(LOOP)),
    st.one_of(st.sampled_from(tuple('()[]{}=:,"<>^@#|-0\n\\ ')), st.text(max_size=3)),
)
def test_text_that_was_mangled_parses_or_is_refused(text: str, at: int, inserted: str) -> None:
    for broken in (text[:at] + inserted + text[at:], text[:at] + text[at + 1 :], text[:at]):
        with suppress(TextError):
            print_program(parse(broken))
