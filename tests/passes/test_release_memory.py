"""Releases of variables, later reads of them, and that a trainer drops them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxfleet.analysis.memory.final_variables import final_variables
from jaxfleet.analysis.step_checks import meaning_rules
from jaxfleet.errors import FeedError, VerifyError
from jaxfleet.ir import parse, verify
from jaxfleet.lower import ExecutableCache
from jaxfleet.lower.partition import Segment, segments
from jaxfleet.observability.timeline import NO_SPANS
from jaxfleet.passes import ReleaseMemory
from jaxfleet.ps.client.trainer_executor import TrainerExecutor

CUT = parse("""
program p
  data  x: f32[4]
  param w: f32[4]
  block 0
    forward
      a: f32[4] = jax.neg(x)
      b: f32[4] = jax.mul(a, x)
      cut()
      c: f32[4] = jax.mul(b, a)
      cut()
      w = jax.mul(c, b)
      fetch(c)
""")


def test_at_cuts_it_stands_before_the_cut_that_ends_the_last_readers_segment() -> None:
    made = ReleaseMemory(at_cuts=True).run(CUT)
    types = [(op.type, op.reads) for op in made.root.ops if op.type in {"cut", "delete_var"}]
    assert types == [("cut", ()), ("delete_var", ("a",)), ("cut", ())]
    assert ReleaseMemory(at_cuts=True).run(made) == made
    assert ReleaseMemory(("a",), at_cuts=True).run(CUT) == CUT


def test_what_is_let_go_in_the_executable_that_makes_it_does_not_leave_it() -> None:
    program = parse(
        str(CUT).replace("jax.neg(x)", "jax.neg(x)\ns: f32[4] = jax.neg(a)\na = jax.neg(s)")
    )
    for made in (ReleaseMemory().run(program), ReleaseMemory(at_cuts=True).run(program)):
        assert any("s" in op.reads for op in made.root.ops if op.type == "delete_var")
        _, (first, *_) = segments(made, {}, cache=ExecutableCache())
        assert isinstance(first, Segment)
        assert set(first.writes) == {"a", "b"}


def test_at_cuts_a_name_that_is_written_again_is_not_let_go() -> None:
    again = "c: f32[4] = jax.mul(b, a)\na = jax.neg(c)"
    program = parse(
        str(CUT).replace("c: f32[4] = jax.mul(b, a)", again).replace("(c, b)", "(a, b)")
    )
    made = ReleaseMemory(at_cuts=True).run(program)
    verify(made, more_rules=meaning_rules)
    assert not any("a" in op.reads for op in made.root.ops if op.type == "delete_var")


def test_what_a_cut_let_go_is_not_fetched() -> None:
    made = ReleaseMemory(at_cuts=True).run(CUT)
    assert final_variables(made, ["b", "c"]) == ("b", "c")
    with pytest.raises(FeedError, match="'a' is fetched, and release_memory let it go"):
        final_variables(made, ["a"])


class _Watched(TrainerExecutor):
    """Records its content each time the host has done its part."""

    held: list[set[str]]

    def _on_host(self, ops: Any, values: dict[str, Any], *, confirms: bool) -> None:
        super()._on_host(ops, values, confirms=confirms)
        self.held.append(set(values))


def test_a_trainer_drops_what_nothing_reads_whether_a_program_says_so_or_not() -> None:
    me = SimpleNamespace(trainer=0)
    client: Any = SimpleNamespace(me=me, doing=lambda _: None, spans=NO_SPANS, step=0)
    x = np.arange(4, dtype=np.float32)
    found = []
    for program in (CUT, ReleaseMemory(at_cuts=True).run(CUT)):
        trainer = _Watched(program, client, ExecutableCache())
        trainer.held = []
        state, fetched = trainer.run({"w": x}, {"x": x}, {})
        found.append([np.asarray(state["w"]), np.asarray(fetched[0])])
        assert ["a" in held for held in trainer.held[:2]] == [True, False]
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        ("b: f32[4] = jax.neg(a)", "'a' is read after delete_var let it go"),
        ("delete_var(X=a)", "'a' is let go twice"),
        (
            "b: f32[4] = jax.cond(0:i32) {branches=[^1]}\n  block 1 () -> (a)",
            "'a' is read after delete_var let it go",
        ),
        ("a = jax.neg(x)\n      b: f32[4] = jax.neg(a)", ""),
    ],
)
def test_the_verifier_knows_what_was_let_go(more: str, wrong: str) -> None:
    head = "program p\n  data x: f32[4]\n  block 0\n    forward\n"
    program = parse(f"{head}      a: f32[4] = jax.neg(x)\n      delete_var(X=a)\n      {more}\n")
    if not wrong:
        verify(program, more_rules=meaning_rules)
        return
    with pytest.raises(VerifyError, match=wrong):
        verify(program, more_rules=meaning_rules)
