"""roll_layers: groups that become a loop, and others; the docstring shows the plain case."""

from collections.abc import Sequence

import pytest

from jaxfleet.errors import PassError
from jaxfleet.ir import Program, parse, verify
from jaxfleet.passes import RollLayers

HEAD = """
program p
  data  x: f32[4]
  param u: f32[4]
  param v: f32[4]
  param w: f32[4]
  param z: f32[4]
  state m: f32[4]
  block 0
    forward
"""


def cut(*groups: Sequence[str]) -> Program:
    """Returns a program of groups, given by their lines."""
    lines = ["cut()"]
    for group in groups:
        lines += [*group, "cut()"]
    return parse(HEAD + "\n".join(f"      {line}" for line in lines[1:-1]))


def rolled(program: Program, least: int = 3) -> Program:
    made = RollLayers(least=least).run(program)
    verify(made)
    return made


def loops(program: Program) -> list[object]:
    return [op.attrs["length"] for op in program.root.ops if op.type == "jax.scan"]


def layer(read: str, param: str, made: str, operator: str = "sin") -> list[str]:
    return [
        f"{made}.in: f32[4] = jax.mul({read}, {param})",
        f"{made}: f32[4] = jax.{operator}({made}.in)",
    ]


FOUR = (layer("x", "u", "a"), layer("a", "v", "b"), layer("b", "w", "c"), layer("c", "z", "d"))


def test_what_does_not_repeat_stays_as_it_is() -> None:
    whole = cut(layer("x", "u", "a"))
    several = cut(layer("x", "u", "a"), layer("a", "v", "b", "cos"), layer("b", "w", "c", "exp"))
    for program in (whole, several):
        assert RollLayers().run(program) is program


def test_a_run_shorter_than_wanted_stays() -> None:
    program = cut(*FOUR, ["fetch(d)"])
    assert RollLayers(least=5).run(program) is program
    assert loops(rolled(program, least=4)) == [4]


def test_an_unequal_layer_ends_a_run() -> None:
    more = (layer("d", "u", "e", "cos"), layer("e", "u", "f"), layer("f", "v", "g"))
    made = rolled(cut(*FOUR, *more, layer("g", "w", "h"), ["fetch(h)"]))
    assert loops(made) == [4, 3]
    assert sum(op.type == "jax.cos" for op in made.root.ops) == 1


def test_what_is_read_of_a_turn_is_taken_out_where_it_is_read() -> None:
    made = rolled(cut(*FOUR, ["e: f32[4] = jax.add(b.in, d)", "fetch(e)"]))
    types = [op.type for op in made.root.ops]
    assert types == [
        *("jax.stack", "jax.scan", "cut"),
        *("jax.slice", "jax.squeeze", "jax.add", "fetch"),
    ]
    assert [op.writes for op in made.root.ops if op.type == "jax.squeeze"] == [("b.in",)]


def test_numbers_that_count_are_counted_and_others_are_stacked() -> None:
    def group(read: str, made: str, count: int, factor: float) -> list[str]:
        return [
            f"{made}.0: f32[4] = jax.mul({read}, {factor}:f32)",
            f"{made}.1: f32[4] = jax.cumsum({made}.0, {count}:u32)",
            f"{made}: f32[4] = jax.mul({made}.1, 0.5:f32)",
        ]

    parts = (group("x", "a", 5, 1.0), group("a", "b", 3, 4.0), group("b", "c", 1, 9.0))
    made = rolled(cut(*parts, ["fetch(c)"]))
    (stack,) = (op for op in made.root.ops if op.type == "jax.stack")
    assert [str(x) for x in stack.inputs] == ["1.0:f32", "4.0:f32", "9.0:f32"]
    assert [op.type for op in made.root.ops[:3]] == ["jax.stack", "jax.iota", "jax.mul"]
    assert "0.5:f32" in str(made.blocks[1].ops[2])


def test_state_that_all_overwrite_is_carried_and_written_back() -> None:
    def group(read: str, made: str) -> list[str]:
        return [f"{made}: f32[4] = jax.mul({read}, m)", f"m = jax.add(m, {made})"]

    made = rolled(cut(group("x", "a"), group("a", "b"), group("b", "c"), ["fetch(c)"]))
    (loop,) = (op for op in made.root.ops if op.type == "jax.scan")
    assert loop.attrs["num_carry"] == 2
    assert set(loop.writes) == {"c", "m"}


def test_parameters_are_updated_each_in_its_place() -> None:
    groups = [[f"{p} = jax.mul({p}, x)"] for p in "uvwz"]
    made = rolled(cut(*groups))
    assert [op.writes[0] for op in made.root.ops if op.type == "jax.squeeze"] == list("uvwz")


@pytest.mark.parametrize(
    "groups",
    [
        (FOUR[0], FOUR[1], layer("a", "w", "c"), layer("b", "z", "d")),  # of the one before that
        [[f"{p} = jax.mul({p}, x)", f"{p}.1: f32[4] = jax.neg(z)"] for p in "uzw"],  # z is new
        [[f"{p}.1: f32[4] = jax.neg(x)", f"fetch({p}.1)"] for p in "uvw"],  # a side effect
    ],
)
def test_groups_that_depend_otherwise_stay(groups: Sequence[Sequence[str]]) -> None:
    program = cut(*groups)
    assert RollLayers().run(program) is program


def test_a_loop_in_a_layer_is_copied_once() -> None:
    def group(read: str, made: str, block: int) -> list[str]:
        attrs = "length=2, num_carry=1, num_consts=0, reverse=false, unroll=1"
        return [f"{made}: f32[4] = jax.scan({read}) {{body=^{block}, {attrs}}}"]

    text = str(cut(group("x", "a", 1), group("a", "b", 2), group("b", "c", 3), ["fetch(c)"]))
    for block, function in ((1, "sin"), (2, "sin"), (3, "sin")):
        text += f"\n  block {block} (i: f32[4]) -> (o)\n    forward\n"
        text += f"      o: f32[4] = jax.{function}(i)"
    made = rolled(parse(text))
    assert loops(made) == [3]
    assert len(made.blocks) == 3
    other = parse(text[::-1].replace("nis", "soc", 1)[::-1])
    assert RollLayers().run(other) is other


def test_a_loop_over_one_layer_is_refused() -> None:
    with pytest.raises(PassError, match="a loop over 1 layers is none"):
        RollLayers(least=1).run(cut(*FOUR))
