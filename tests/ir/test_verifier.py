"""Each rule of the verifier, a program that breaks it, and the finding."""

from collections.abc import Iterator
from dataclasses import replace
from inspect import getdoc

import numpy as np
import pytest
from hypothesis import given

from jaxfleet.errors import VerifyError
from jaxfleet.ir import (
    Attrs,
    Block,
    BlockRef,
    Finding,
    Kind,
    Literal,
    Operands,
    Operator,
    Program,
    Source,
    Variable,
    make_constant,
    parse,
    verify,
)
from jaxfleet.ir.verifier import STRUCTURAL_RULES
from jaxfleet.testing.programs import valid_programs
from tests.drawing import at_most
from tests.ir.timing import seconds

HEAD = """
program p
  data  x: f32[b]
  param w: f32[4]
  state s: f32[]
  const c: f32[1] = [1.0]
  block 0
    forward
"""

# Rule, violation (after HEAD), and the message.
BROKEN = [
    (
        "sizes_are_not_negative",
        "y: f32[-1,4] = f(x)",
        "'y' has type f32[-1,4]: -1 is not a size; give what is known only at run time a letter",
    ),
    (
        "constants_have_values",
        "temp t: f32[1] = @c1",
        "temp 't' has a constant's value",
    ),
    (
        "what_outlives_a_block_is_the_programs",
        "state k: i32[]",
        "state 'k' is declared in block 0, and belongs to the program",
    ),
    (
        "names_mean_one_variable",
        "x: f32[b] = f(w)",
        "'x' of block 0 hides the program's",
    ),
    (
        "names_mean_one_variable",
        """y: f32[] = f(x)
           f() {a=^1}
           block 1
             forward
               f() {a=^2}
           block 2 in 1
             forward
               y: f32[] = f(x)""",
        "'y' of block 2 hides that of block 0",
    ),
    (
        "sub_blocks_exist",
        "f(x) {body=^1}",
        "^1 names no sub-block",
    ),
    (
        "sub_blocks_exist",
        "f(x) {bodies=Many{all=[^0]}}",
        "^0 names no sub-block",
    ),
    (
        "sub_blocks_stand_inside",
        """f(x) {body=^1}
           block 1
             forward
               f(x) {body=^1}""",
        "^1 does not lie in block 1, which runs it",
    ),
    (
        "sub_blocks_stand_inside",
        """f(x) {body=^1}
           block 1
             forward
               f(x) {body=^2}
           block 2""",
        "^2 does not lie in block 1, which runs it",
    ),
    (
        "sub_blocks_have_one_owner",
        """f(x) {body=^1}
           g(x) {body=^1}
           block 1""",
        "^1 is run by two operators, the other is: f(x) {body=^1}",
    ),
    (
        "arguments_are_distinct_temporaries",
        """f(x) {body=^1}
           block 1 (i) -> ()""",
        "argument 'i' of block 1 is not declared there",
    ),
    (
        "arguments_are_distinct_temporaries",
        """f(x) {body=^1}
           block 1 (i) -> ()
             const i: f32[1] = [1.0]""",
        "argument 'i' of block 1 is a const, not a temp",
    ),
    (
        "arguments_are_distinct_temporaries",
        """f(x) {body=^1}
           block 1 (i: i32[], i) -> ()""",
        "block 1 has an argument twice: i, i",
    ),
    (
        "operands_are_declared",
        "w = f(y)",
        "'y' is not declared in block 0 or around it",
    ),
    (
        "operands_are_declared",
        "y = f(x)",
        "'y' is not declared in block 0 or around it",
    ),
    (
        "operands_are_declared",
        """f(x) {body=^1}
           g(i)
           block 1 (i: i32[]) -> (i)""",
        "'i' is not declared in block 0 or around it",
    ),
    (
        "operands_are_declared",
        """f(x) {body=^1}
           block 1 () -> (y)""",
        "'y', a result of block 1, is not declared",
    ),
    (
        "slots_are_named_once",
        "f(X=x, Y=w, X=[x, w])",
        "input slot 'X' is given twice",
    ),
    (
        "slots_are_named_once",
        "Out=w, Out=s = f(x)",
        "output slot 'Out' is given twice",
    ),
    (
        "outputs_are_variables",
        "2.0:f32 = f(x)",
        "a literal is written",
    ),
    (
        "outputs_are_distinct",
        "w, s, w = f(x)",
        "'w' is written twice by one operator",
    ),
    (
        "constants_are_not_written",
        "c = f(x)",
        "const 'c' is written",
    ),
    (
        "temporaries_are_written_before_read",
        """temp y: f32[]
           g(y)
           y = f(x)""",
        "'y' is read before anything writes it",
    ),
    (
        "temporaries_are_written_before_read",
        """temp y: f32[]
           f(x) {body=^1}
           block 1
             forward
               f(y)""",
        "'y' is read before anything writes it",
    ),
    (
        "temporaries_are_written_before_read",
        """f(x) {body=^1}
           block 1 () -> (y)
             temp y: f32[]""",
        "'y', a result of block 1, is never written",
    ),
    (
        "role_vars_are_declared",
        "f(x) for (w, w@GRAD), (v, v@GRAD)",
        "'v', which the operator is for, is not declared",
    ),
]

# Violations without a text form: the parser would reject or repair them.
UNPARSABLE = [
    ("there_is_a_root", Program(blocks=()), "it has no blocks"),
    (
        "blocks_are_numbered_by_place",
        Program(blocks=(Block(), Block(2, 0))),
        "block 2 stands at place 1",
    ),
    (
        "blocks_are_numbered_by_place",
        Program(blocks=(Block(), Block(1))),
        "block 1 has parent -1",
    ),
    (
        "names_match_their_keys",
        Program(variables={"x": Variable("y", "f32", (), Kind.DATA)}),
        "variable 'y' is kept under 'x'",
    ),
    (
        "everything_has_a_name",
        Program(variables={"": Variable("", "f32", (2,), Kind.DATA)}),
        "a variable of type f32[2] has no name",
    ),
    (
        "everything_has_a_name",
        Program(blocks=(Block(ops=(Operator(""),)),)),
        "an operator has no type",
    ),
    (
        "constants_have_values",
        Program(variables={"c": Variable("c", "f32", (), Kind.CONST)}),
        "const 'c' has no value",
    ),
    (
        "constants_have_their_types",
        Program(
            variables={"c": Variable("c", "f32", (2,), Kind.CONST, make_constant(np.arange(2)))}
        ),
        "const 'c' is declared f32[2], its value is i64[2]",
    ),
]


@pytest.mark.parametrize(("rule", "lines", "message"), BROKEN)
def test_a_broken_rule_is_found(rule: str, lines: str, message: str) -> None:
    _check_finding(parse(HEAD + lines), rule, message)


@pytest.mark.parametrize(("rule", "program", "message"), UNPARSABLE)
def test_a_rule_broken_past_the_parser_is_found(rule: str, program: Program, message: str) -> None:
    _check_finding(program, rule, message)


def test_every_rule_has_a_program_that_breaks_it() -> None:
    broken = {rule for rule, _, _ in BROKEN} | {rule for rule, _, _ in UNPARSABLE}
    assert broken == {rule.__name__ for rule in STRUCTURAL_RULES}


def test_every_rule_says_in_a_sentence_what_it_asks_for() -> None:
    for rule in STRUCTURAL_RULES:
        sentence = getdoc(rule) or ""
        assert sentence.endswith("."), rule
        assert "\n" not in sentence, rule


@at_most(200)
@given(valid_programs())
def test_a_valid_program_passes(program: Program) -> None:
    verify(program)


def test_the_error_shows_the_operator_and_the_users_line() -> None:
    op = Operator("fc", Operands.of("x"), source=Source("net/train.py", 14, "build_model"))
    with pytest.raises(VerifyError) as caught:
        verify(Program("mlp", blocks=(Block(ops=(op,)),)))
    assert str(caught.value) == "program 'mlp': 'x' is not declared in block 0 or around it"
    assert caught.value.__notes__ == ["  net/train.py:14, in build_model", "  op: fc(x)"]


def test_more_rules_are_checked_after_the_structural_ones() -> None:
    def no_sin(program: Program) -> Iterator[Finding]:
        """Nothing is a sine."""
        for op in program.root.ops:
            if op.type == "sin":
                yield "a sine", op

    program = parse(HEAD + "sin(x)")
    verify(program)
    with pytest.raises(VerifyError, match="program 'p': a sine"):
        verify(program, more_rules=[no_sin])


def test_the_body_of_a_loop_may_read_what_its_last_turn_wrote() -> None:
    body = """f(x) {body=^1}
           block 1
             temp y: f32[]
             forward
               f(y)
               y = g(x)"""
    verify(parse(HEAD + body))


def test_what_a_sub_block_writes_is_written_after_its_operator() -> None:
    text = """temp y: f32[]
           f(x) {body=^1}
           g(y)
           block 1
             forward
               f(x) {body=^2}
           block 2 in 1
             forward
               y = f(x)"""
    verify(parse(HEAD + text))


def test_sub_blocks_in_a_chain_may_be_run_from_the_root() -> None:
    text = """f(x) {blocks=[^1, ^2]}
           block 1
             forward
               y: f32[] = f(x)
           block 2 in 1
             forward
               w = f(y)"""
    verify(parse(HEAD + text))


def test_siblings_may_use_a_name_each() -> None:
    text = """f(x) {a=^1, b=^2}
           block 1 (i: i32[]) -> (i)
           block 2 (i: f32[]) -> (i)"""
    verify(parse(HEAD + text))


def test_verifying_takes_time_in_proportion_to_the_operators() -> None:
    short, long = (_long_program(ops) for ops in (1_000, 10_000))
    assert seconds(lambda: verify(long)) < 1.0  # 0.05 on the development machine
    assert seconds(lambda: verify(long)) < 60 * seconds(lambda: verify(short))


def test_a_chain_of_blocks_takes_no_longer_for_its_depth() -> None:
    count = 2_000
    step = Operator("sgd", Operands.of("w", "x"), Operands.of("w"))
    chain = [Block(index, index - 1, ops=(step,) * 5) for index in range(1, count)]
    refs = tuple(BlockRef(block.index) for block in chain)
    root = Block(ops=(Operator("listen_and_serv", attrs=Attrs({"optimize": refs})),))
    program = replace(parse(HEAD), blocks=(root, *chain))
    assert seconds(lambda: verify(program)) < 1.0  # walking up from each block would take seconds


def _check_finding(program: Program, rule: str, message: str) -> None:
    with pytest.raises(VerifyError) as caught:
        verify(program)
    assert str(caught.value) == f"program '{program.name}': {message}"
    (found,) = (r for r in STRUCTURAL_RULES if r.__name__ == rule)
    assert message in [what for what, _ in found(program)]


def _long_program(count: int) -> Program:
    names = [f"t{index}" for index in range(count)]
    ops = [
        Operator(
            "jax.add",
            Operands.of(names[max(index - 1, 0)] if index else "x", Literal.of(1.0, "f32")),
            Operands.of(name),
            Attrs({"axes": (0, 1), "body": None}),
            role_var=(("w", "w@GRAD"),),
        )
        for index, name in enumerate(names)
    ]
    variables = {name: Variable(name, "f32", (4,)) for name in names}
    return replace(parse(HEAD), blocks=(Block(variables=variables, ops=tuple(ops)),))
