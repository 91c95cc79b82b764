"""What a plan says to save is not computed again, and is there for backward."""

from jaxfleet.ir import parse
from jaxfleet.passes.recompute import Recompute

STEP = """
program p
  data  x: f32[4]
  param v: f32[4]
  param w: f32[4]
  block 0
    forward
      a: f32[4] = jax.mul(x, v)
      s: f32[4] = jax.sin(a)
      c: f32[4] = jax.cos(a)
      h: f32[4] = jax.mul(s, w)
    backward
      w@GRAD: f32[4] = jax.mul(h, s) for (w, w@GRAD)
      s@GRAD: f32[4] = jax.mul(h, w)
      a@GRAD: f32[4] = jax.mul(s@GRAD, c)
      v@GRAD: f32[4] = jax.mul(a@GRAD, x) for (v, v@GRAD)
    optimize
      v = jax.sub(v, v@GRAD)
      w = jax.sub(w, w@GRAD)
"""


def again(saved: tuple[str, ...]) -> list[str]:
    done = Recompute(cuts=(3,), kept=(False, True), saved=saved).run(parse(STEP))
    return [name for op in done.root.ops for name in op.writes if "@RECOMPUTE" in name]


def test_what_is_saved_is_not_computed_again() -> None:
    assert again(()) == ["a@RECOMPUTE", "c@RECOMPUTE"]
    assert again(("a",)) == ["c@RECOMPUTE"]
    assert again(("c",)) == []
