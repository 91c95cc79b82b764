"""The abbreviated view: shown and folded parts."""

from hypothesis import given
from hypothesis import strategies as st

from jaxfleet.ir import (
    Block,
    Kind,
    Operands,
    Operator,
    Program,
    Role,
    Source,
    Variable,
    parse,
    print_folded,
    print_program,
)
from jaxfleet.testing.programs import valid_programs
from tests.drawing import at_most


def communicates(op: Operator) -> bool:
    return op.type.startswith("c_")


def layers(count: int) -> Program:
    """Returns a step with three forward, three backward operators and an all-reduce per layer."""
    forward, backward, dist, optimize = [], [], [], []
    params = {}
    for layer in range(count):
        w = f"params/Block_{layer // 4}/Dense_{layer % 4}/kernel"
        params[w] = Variable(w, "f32", (4, 4), Kind.PARAM)
        source = Source("models/cnn.py", 10 + layer, "__call__", w[7:-7])
        forward += [Operator(t, Operands.of(w), source=source) for t in ("jax.dot", "jax.add")]
        grad = Operands.of(f"g{layer}")
        backward.append(
            Operator("jax.mul", Operands.of(w), grad, role=Role.BACKWARD, source=source)
        )
        backward.append(Operator("jax.neg", Operands.of(w), role=Role.BACKWARD))  # no scope
        made = Source("models/cnn.py", 10 + layer, "__call__", made_by="grad_allreduce")
        dist.append(Operator("c_allreduce_sum", grad, grad, role=Role.DIST, source=made))
        optimize.append(Operator("sgd", grad, Operands.of(w), role=Role.OPTIMIZE))
    gradients = {f"g{layer}": Variable(f"g{layer}", "f32", (4, 4)) for layer in range(count)}
    ops = tuple(forward + backward + dist + optimize)
    return Program("step", params, (Block(variables=gradients, ops=ops),))


def test_a_program_that_fits_is_printed_whole() -> None:
    program = layers(3)
    text = print_folded(program, keep=communicates)
    assert text == print_program(program, source=True)
    assert print_folded(program, keep=communicates, source=False) == print_program(program)


def test_runs_of_operators_are_folded_by_their_scopes() -> None:
    text = print_folded(layers(16), keep=communicates, max_lines=60)
    lines = [line.strip() for line in text.splitlines()]
    assert "# 8 operators in Block_0: dot 4, add 4" in lines
    assert "# 7 operators in Block_3: mul 4, neg 3" in lines  # the last has no scope
    assert "# 16 operators: sgd 16" in lines
    assert len(lines) <= 60


def test_what_is_kept_is_shown_with_its_source_line() -> None:
    lines = print_folded(layers(40), keep=communicates, max_lines=60).splitlines()
    shown = [line for line in lines if "= c_allreduce_sum(" in line]
    assert len(shown) == 40
    assert shown[7] == (
        "      g7 = c_allreduce_sum(g7)  # models/cnn.py:17, in __call__; by grad_allreduce"
    )


def test_declarations_are_folded_by_their_paths() -> None:
    lines = print_folded(layers(16), keep=communicates, max_lines=32).splitlines()
    assert "  # 4 param in params/Block_2: f32[4,4] 4" in lines
    lines = print_folded(layers(16), keep=communicates, max_lines=28).splitlines()
    assert "  # 16 param in params: f32[4,4] 16" in lines


def test_source_lines_are_left_out_when_not_asked_for() -> None:
    text = print_folded(layers(40), keep=communicates, max_lines=60, source=False)
    assert "      g7 = c_allreduce_sum(g7)\n" in text
    assert "cnn.py" not in text


def test_roles_that_alternate_are_folded_together_at_last() -> None:
    roles = [Role.FORWARD, Role.BACKWARD] * 100
    program = Program(blocks=(Block(ops=tuple(Operator("f", role=role) for role in roles)),))
    assert print_folded(program, keep=communicates, max_lines=10).splitlines() == [
        "program main",
        "  block 0",
        "    # 200 operators (forward 100, backward 100): f 200",
    ]


def test_sub_blocks_with_nothing_to_keep_are_folded_together_at_last() -> None:
    lines = ["program p", "data x: f32[]", "block 0", "forward"]
    lines += [f"loop(x) {{body=^{index}}}" for index in range(1, 10)]
    for index in range(1, 10):
        lines += [f"block {index}", "forward", "f(x)", "c_sum(x)" if index == 4 else "g(x)"]
    text = print_folded(parse("\n".join(lines)), keep=communicates, max_lines=12)
    assert text.splitlines() == [
        "program p",
        "  data  x: f32[]",
        "  block 0",
        "    forward",
        "      # 9 operators: loop 9",
        "  # blocks 1 to 3, 6 operators: f 3, g 3",
        "  block 4",
        "    forward",
        "      f(x)",
        "      c_sum(x)",
        "  # blocks 5 to 9, 10 operators: f 5, g 5",
    ]


def test_what_a_folded_operator_declared_is_an_update_where_it_is_shown() -> None:
    lines = ["program p", "data x: f32[]", "block 0", "forward"]
    lines += ["t: f32[] = f(x)", *["g(x)"] * 20, "t = c_sum(t)"]
    text = print_folded(parse("\n".join(lines)), keep=communicates, max_lines=8)
    assert text.splitlines()[4:] == ["      # 21 operators: g 20, f 1", "      t = c_sum(t)"]


def test_long_lists_in_the_heading_are_cut_short() -> None:
    heading = f"program p {{devices=4, donate=[{', '.join('ABCDEFGH')}]}}"
    program = parse("\n".join([heading, "block 0", "rpc", *["f()"] * 200]))
    text = print_folded(program, keep=communicates)
    assert text.startswith("program p {devices=4, donate=[A, B, and-6-more]}\n")


@at_most(200)
@given(valid_programs(), st.integers(1, 40))
def test_every_kept_operator_is_shown_and_every_other_counted(
    program: Program, max_lines: int
) -> None:
    text = print_folded(program, keep=communicates, max_lines=max_lines, source=False)
    lines = [line.strip() for line in text.splitlines()]
    kept = [op for block in program.blocks for op in block.ops if communicates(op)]
    assert sum("c_allreduce_sum(" in line for line in lines) == len(kept)
    folded = sum(
        int(line.split(" operators")[0].split()[-1]) for line in lines if "operators" in line
    )
    calls = sum(line.endswith(")") or "}" in line or ") for " in line for line in lines)
    assert folded <= program.op_count
    assert folded + calls >= program.op_count
