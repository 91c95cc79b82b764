"""recompute: cuts, recomputation and rejections; the docstring shows the plain case."""

from itertools import pairwise

import pytest

from jaxfleet.analysis.memory.live_ranges import executables
from jaxfleet.errors import PassError
from jaxfleet.ir import Operator, Program, parse, verify
from jaxfleet.passes import Recompute
from jaxfleet.passes.memory.recompute import default_cut_points
from jaxfleet.testing import docstring_programs

((STEP, _),) = docstring_programs(Recompute)
H, W = "h: f32[4] = jax.mul(s, w)", "param w: f32[4]"


def chain(moved: str = "n: f32[4] = jax.neg(s)", read: str = "w") -> Program:
    """Returns the docstring's step of two layers, with one more operator before the second.

    Args:
        moved: that operator.
        read: additional input of the second layer.
    """
    text = STEP.replace(H, f"{moved}\n{H.replace('w', read)}").replace(W, f"{W}\nstate m: f32[4]")
    return parse(f"{text}\nfetch(h)")


def again(program: Program) -> list[str]:
    return [name for op in program.root.ops for name in op.writes if name.endswith("@RECOMPUTE")]


def written_by(program: Program, name: str) -> list[tuple[int, Operator]]:
    return [(n, op) for n, op in enumerate(program.root.ops) if name in op.writes]


def test_what_only_backward_reads_is_not_made_in_forward() -> None:
    made = Recompute(cuts=(4,)).run(chain())
    verify(made)
    assert again(made) == ["a@RECOMPUTE", "c@RECOMPUTE"]
    assert not written_by(made, "c")


def test_a_kept_group_runs_once() -> None:
    made = Recompute(cuts=(4,), kept=(True, True)).run(chain())
    verify(made)
    assert not again(made)
    assert sum(op.type == "cut" for op in made.root.ops) == 2


@pytest.mark.parametrize(
    ("saved", "run_again"), [(("a",), ["c@RECOMPUTE"]), (("c",), []), (("a", "c"), [])]
)
def test_what_is_saved_besides_is_read_as_it_is(
    saved: tuple[str, ...], run_again: list[str]
) -> None:
    made = Recompute(cuts=(4,), saved=saved).run(chain())
    verify(made)
    assert again(made) == run_again
    for name in saved:
        assert len(written_by(made, name)) == 1


def test_state_that_forward_overwrites_is_written_when_all_have_read_it() -> None:
    made = Recompute(cuts=(4,)).run(chain(moved="m = jax.add(m, s)", read="m"))
    verify(made)
    ((place, op),) = written_by(made, "m")
    assert op.reads == ("m@NEXT",)
    readers = [n for n, other in enumerate(made.root.ops) if "m" in other.reads]
    assert max(readers) < place
    assert [op.reads for _, op in written_by(made, "h")] == [("s", "m@NEXT")]


def test_state_that_is_written_in_and_after_forward_is_refused_with_a_way_out() -> None:
    text = str(chain(moved="m = jax.add(m, s)", read="m"))
    program = parse(text.replace("fetch(h)", "m = jax.neg(m)\nfetch(h)"))
    with pytest.raises(PassError, match="'m' is written by forward and after it") as caught:
        Recompute(cuts=(4,)).run(program)
    assert "op: m = jax.neg(m" in str(caught.value.__notes__)
    assert "write it in one of them" in str(caught.value.hint)


def test_an_update_waits_for_what_reads_the_old_value_again() -> None:
    made = Recompute(cuts=(4,)).run(chain(moved="n: f32[4] = jax.mul(v, s)", read="n"))
    verify(made)
    ((update, _),) = written_by(made, "v")
    readers = [n for n, op in enumerate(made.root.ops) if "v" in op.reads and n != update]
    assert max(readers) < update


@pytest.mark.parametrize(
    ("cuts", "kept", "message"),
    [
        ((4,), (True,), "1 cuts make 2 groups, but kept has 1"),
        ((4, 2), (), r"the cuts \[4, 2\] are not in order"),
    ],
)
def test_groups_that_are_none_are_refused(
    cuts: tuple[int, ...], kept: tuple[bool, ...], message: str
) -> None:
    with pytest.raises(PassError, match=message):
        Recompute(cuts=cuts, kept=kept).run(chain())


def test_a_program_that_is_cut_is_not_cut_again() -> None:
    made = Recompute(cuts=(4,)).run(chain())
    with pytest.raises(PassError, match="the program is cut already"):
        Recompute().run(made)


def test_a_temporary_written_twice_gets_two_names() -> None:
    made = Recompute(cuts=(4,)).run(chain(moved="s = jax.neg(s)", read="s"))
    verify(made)
    assert [op.type for _, op in written_by(made, "s")] == ["jax.neg"]
    assert [op.reads for _, op in written_by(made, "s")] == [("s~1",)]


def test_a_forward_operator_behind_backward_waits_for_what_it_reads() -> None:
    told = "told: f32[4] = assign(v)\nmean: f32[4] = jax.neg(w@GRAD)"
    program = parse(str(chain()).replace("fetch(h)", f"forward\n{told}\nfetch(h, told, mean)"))
    made = Recompute(cuts=(4,)).run(program)
    verify(made)
    assert again(made) == ["a@RECOMPUTE", "c@RECOMPUTE"]
    ((update, _),), ((told_at, _),) = written_by(made, "v"), written_by(made, "told")
    assert update < told_at


def test_what_only_a_waiting_update_reads_is_made_beside_it() -> None:
    before, _ = STEP.split("optimize")
    waits = [
        "optimize",
        *(f"old.{x}: f32[4] = jax.mul(m.{x}, 0.9:f32)" for x in "vw"),
        *(f"{x}.sum: f32[] = jax.reduce_sum({x}@GRAD) {{axes=[0]}}" for x in "vw"),
        "norm: f32[] = jax.add(v.sum, w.sum)",
        *(f"by.{x}: f32[4] = jax.mul({x}@GRAD, norm)" for x in "vw"),
        *(f"m.{x} = jax.add(old.{x}, by.{x})" for x in "vw"),
        *(f"{x} = jax.sub({x}, m.{x})" for x in "vw"),
    ]
    states = "state m.v: f32[4]\nstate m.w: f32[4]"
    program = parse(before.replace(W, f"{W}\n{states}") + "\n".join(waits))
    made = Recompute(cuts=(3,)).run(program)
    verify(made)
    runs_in = executables(made.root.ops)
    for x in "vw":
        ((old, _),), ((update, _),) = written_by(made, f"old.{x}"), written_by(made, f"m.{x}")
        assert runs_in[old] == runs_in[update]
    assert runs_in[written_by(made, "m.v")[0][0]] != runs_in[written_by(made, "m.w")[0][0]]


def test_groups_are_whole_layers_where_most_of_forward_is_equal_layers() -> None:
    layers = "".join(
        f"      a{n}: f32[4] = jax.mul(h{n}, w)\n      h{n + 1}: f32[4] = jax.tanh(a{n})\n"
        for n in range(8)
    )
    text = "program p\n  data x: f32[4]\n  param w: f32[4]\n  block 0\n    forward\n"
    program = parse(f"{text}      h0: f32[4] = jax.neg(x)\n{layers}      fetch(h8)\n")
    cuts = default_cut_points(program)
    assert [later - before for before, later in pairwise(cuts)] == [4] * (len(cuts) - 1)
    assert len(cuts) >= 3
