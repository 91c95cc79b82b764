"""Donated, kept and new leaves of a state."""

from jaxfleet.ir import parse
from jaxfleet.lower import Shares
from jaxfleet.passes import Donate

TRAINS = """
program trains
  data  g: f32[2]
  state m: f32[2]
  param frozen: f32[2]
  param w: f32[2]
  block 0
    optimize
      m = jax.add(m, g)
      d: f32[2] = jax.mul(m, frozen)
      w = jax.sub(w, d)
"""
STATE = ("m", "frozen", "w")


def test_what_is_written_is_given_and_the_rest_is_kept() -> None:
    shares = Shares.of(Donate().run(parse(TRAINS)), STATE, donate=True)
    assert shares == Shares(given=(0, 2), kept=(1,), written=(0, 2))


def test_without_donation_all_is_kept() -> None:
    program = Donate().run(parse(TRAINS))
    wanted = Shares(given=(), kept=(0, 1, 2), written=(0, 2))
    assert Shares.of(program, STATE, donate=False) == wanted
    assert Shares.of(parse(TRAINS), STATE, donate=True) == wanted


def test_leaves_are_split_and_put_together_again() -> None:
    shares = Shares(given=(0, 2), kept=(1,), written=(0, 2))
    given, kept = shares.split(["m", "frozen", "w"])
    assert (given, kept) == (["m", "w"], ["frozen"])
    assert shares.merged(given, kept) == ["m", "frozen", "w"]
    assert shares.updated(["m", "frozen", "w"], ["M", "W"]) == ["M", "frozen", "W"]


def test_a_state_that_is_all_new_is_passed_on_as_it_is() -> None:
    shares = Shares(given=(0, 1), kept=(), written=(0, 1))
    leaves, new = ["m", "w"], ["M", "W"]
    assert shares.split(leaves)[0] is leaves
    assert shares.updated(leaves, new) is new
