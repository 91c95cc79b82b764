"""Inlining a program into another: names, numbers of blocks, and sizes."""

from jaxfleet.ir import parse
from jaxfleet.ir.inline import embed, renamed

PROGRAM = parse("""
program p
  data  g: f32[rows,3]
  param w: f32[rows,3]
  block 0
    optimize
      u: f32[rows,3] = loop(g, w) {body=^2, size=<rows>}
      w = jax.sub(w, u)
  block 1 in 0 (x: f32[]) -> (x)
    optimize
      fetch(x)
  block 2 in 0 (y: f32[rows,3], z: f32[rows,3]) -> (o)
    optimize
      o: f32[rows,3] = jax.mul(y, z)
      fetch(g)
""")


def text(**options: object) -> tuple[str, ...]:
    wanted = {"index": 4, "inner_from": 5, "parent": 1, "names": {}, "sizes": {}, **options}
    made = embed(PROGRAM, **wanted)  # type: ignore[arg-type]
    return tuple(str(op) for block in (made.root, *made.inner) for op in block.ops)


def test_blocks_get_the_numbers_that_are_asked_for() -> None:
    made = embed(PROGRAM, index=4, inner_from=7, parent=1, names={}, sizes={})
    assert (made.root.index, made.root.parent) == (4, 1)
    assert [(block.index, block.parent) for block in made.inner] == [(7, 4)]
    assert [index for op in made.root.ops for index in op.blocks] == [7]


def test_blocks_that_nothing_leads_to_are_left_out() -> None:
    made = embed(PROGRAM, index=0, inner_from=1, parent=-1, names={}, sizes={})
    assert [op.type for block in made.inner for op in block.ops] == ["jax.mul", "fetch"]


def test_names_change_in_every_block() -> None:
    found = text(names={"g": "g.block0", "w": "w.block0", "o": "out", "y": "left"})
    assert found == (
        "u = loop(g.block0, w.block0) {body=^5, size=<rows>}",
        "w.block0 = jax.sub(w.block0, u)",
        "out = jax.mul(left, z)",
        "fetch(g.block0)",
    )


def test_arguments_and_results_of_inner_blocks_are_renamed_too() -> None:
    made = embed(PROGRAM, index=0, inner_from=1, parent=-1, names={"o": "q", "y": "a"}, sizes={})
    assert made.inner[0].args == ("a", "z")
    assert made.inner[0].results == ("q",)


def test_letters_become_numbers_in_types_and_attributes() -> None:
    made = embed(PROGRAM, index=0, inner_from=1, parent=-1, names={}, sizes={"rows": 2})
    assert {v.shape for v in made.variables.values()} == {(2, 3)}
    assert made.root.variables["u"].shape == (2, 3)
    assert made.root.ops[0].attrs["size"] == 2
    assert made.inner[0].variables["o"].shape == (2, 3)


def test_renaming_nothing_is_the_same_program() -> None:
    assert renamed(PROGRAM, {}) is PROGRAM


def test_a_renamed_program_keeps_its_attributes_and_parses() -> None:
    made = renamed(PROGRAM, {"w": "v"})
    assert made.name == "p"
    assert set(made.variables) == {"g", "v"}
    assert parse(str(made)) == made
