"""offload: moved and unmoved values; the docstring shows the plain case."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxfleet.analysis.memory.live_ranges import executables
from jaxfleet.errors import PassError
from jaxfleet.ir import Program, parse, verify
from jaxfleet.passes import CutApart, Offload, ReleaseMemory
from jaxfleet.pipeline import run_pipeline
from tests.passes.drawn import programs

HEAD = """
program p
  data  x: f32[9]
  state s: f32[9]
  block 0
"""
CHAIN = ("a: f32[9] = jax.sort(h)", "b: f32[9] = jax.sort(a)", "c: f32[9] = jax.sort(b)")
ALL = Offload(smallest_bytes=0)


def program(*executables: str) -> Program:
    """Returns a program with one executable for each group of lines, all of forward."""
    text = "\n      cut()\n      ".join(executables)
    return parse(f"{HEAD}    forward\n      {text}\n")


def moves(made: Program) -> list[str]:
    verify(made)
    return [
        "|" if op.type == "cut" else f"{op.type} {op.reads[0]}"
        for op in made.root.ops
        if op.type in {"cut", "to_host", "to_device"}
    ]


def test_a_value_that_is_read_soon_stays() -> None:
    soon = program("h: f32[9] = jax.sort(x)", *CHAIN[:2], "s = jax.add(b, h)")
    assert ALL.run(soon) is soon
    assert moves(Offload(smallest_bytes=0, ahead=0).run(soon)) == [
        *("|", "to_host h", "|", "|", "to_device h@HOST")
    ]


def test_a_value_comes_back_for_every_reader_that_is_far_from_the_last() -> None:
    first = ("h: f32[9] = jax.sort(x)", *CHAIN, "d: f32[9] = jax.sort(c)")
    lines = (*first, "e: f32[9] = jax.add(d, h)", "f: f32[9] = jax.sort(e)")
    wanted = ["|", "to_host h", "|", "|", "|", "to_device h@HOST", "|", "|"]
    near = ALL.run(program(*lines, "s = jax.add(f, h)"))
    assert moves(near) == [*wanted, "|"]
    assert near.root.ops[-1].reads[1] == "h@BACK"
    far = ALL.run(program(*lines, "g: f32[9] = jax.sort(f)", "s = jax.add(g, h)"))
    assert moves(far) == [*wanted, "|", "to_device h@HOST", "|"]
    assert far.root.ops[-1].reads[1] == "h@BACK~1"


@pytest.mark.parametrize(
    ("first", "last"),
    [
        pytest.param("h: f32[9] = jax.sort(x)", "s = jax.add(d, h)\n      fetch(h)", id="fetched"),
        pytest.param("h: f32[] = jax.dot(x, x)", "s = jax.mul(d, h)", id="scalar"),
        pytest.param(
            "h: f32[9] = jax.sort(x)\n      h = jax.neg(h)", "s = jax.add(d, h)", id="twice"
        ),
        pytest.param("s = jax.sort(x)", "s = jax.add(d, s)", id="state"),
    ],
)
def test_what_may_not_be_moved_stays(first: str, last: str) -> None:
    middle = [line.replace("(h)", "(x)") for line in CHAIN]
    stays = program(first, *middle, "d: f32[9] = jax.sort(c)", last)
    verify(stays)
    assert ALL.run(stays) is stays


def test_only_what_is_named_and_large_is_moved() -> None:
    lines = ("h: f32[9] = jax.sort(x)", *CHAIN, "d: f32[9] = jax.sort(c)", "s = jax.add(d, h)")
    made = program(*lines)
    assert Offload(smallest_bytes=37).run(made) is made
    assert Offload(smallest_bytes=36).run(made) is not made
    assert Offload(values=("a",), smallest_bytes=0).run(made) is made
    with pytest.raises(PassError, match="no value 'z'"):
        Offload(values=("z",)).run(made)


def test_it_wants_a_program_that_is_cut_and_not_moved_yet() -> None:
    with pytest.raises(PassError, match="one executable") as refused:
        ALL.run(program("s = jax.sort(x)"))
    assert "passes='recompute,offload'" in "".join(refused.value.__notes__)
    lines = ("h: f32[9] = jax.sort(x)", *CHAIN, "d: f32[9] = jax.sort(c)", "s = jax.add(d, h)")
    with pytest.raises(PassError, match="moved already"):
        ALL.run(ALL.run(program(*lines)))
    with pytest.raises(PassError, match="must run after"):
        run_pipeline(program(*lines), [ReleaseMemory(), ALL])
    with pytest.raises(PassError, match="neither may be less than 0"):
        Offload(ahead=-1).run(program(*lines))


@given(programs(), st.integers(1, 3), st.integers(0, 2))
def test_nothing_but_moves_is_added(drawn: Program, every: int, ahead: int) -> None:
    cuts = tuple(range(every, len(drawn.root.ops), every))
    assume(cuts)
    cut = CutApart(cuts=cuts).run(drawn)
    made = Offload(smallest_bytes=0, ahead=ahead).run(cut)
    verify(made)
    original: dict[str, str] = {}
    ops = []
    for op in made.root.ops:
        if op.type in {"to_host", "to_device"}:
            original[op.writes[0]] = original.get(op.reads[0], op.reads[0])
        else:
            ops.append(replace(op, inputs=op.inputs.renamed(original)))
    assert tuple(ops) == cut.root.ops
    _check_absent(made, original)


def _check_absent(made: Program, original: Mapping[str, str]) -> None:
    """Checks that a value that returns was absent while a whole executable ran."""
    numbers, ops = executables(made.root.ops), made.root.ops
    for place, op in enumerate(ops):
        if op.type == "to_device":
            value = original[op.writes[0]]
            held = [n for n, other in zip(numbers[:place], ops, strict=False)
                    if value in {original.get(x, x) for x in (*other.reads, *other.writes)}
                    and other.type != "to_device"]  # fmt: skip
            assert numbers[place] - max(held) > 1


def test_what_a_sub_block_reads_comes_back_for_it() -> None:
    lines = ("h: f32[9] = jax.sort(x)", *CHAIN, "d: f32[9] = jax.sort(c)")
    last = """s = jax.scan(d) {body=^1}
  block 1 (v: f32[9]) -> (w)
    forward
      w: f32[9] = jax.add(v, h)
    """
    made = ALL.run(program(*lines, last))
    assert moves(made) == ["|", "to_host h", "|", "|", "|", "to_device h@HOST", "|"]
    (number,) = made.root.ops[-1].blocks
    assert made.blocks[number].ops[0].reads == ("v", "h@BACK")
