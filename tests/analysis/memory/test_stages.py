"""Conversion of a step to a chain: possible cuts, execution times, and sums over values."""

import random
from itertools import pairwise

import numpy as np
import pytest

from jaxfleet.analysis.memory import schedule_constraints, stages_of
from jaxfleet.analysis.memory.chain import IntervalSums, RecomputeNeeds, reversed_table
from jaxfleet.analysis.memory.costs import TemporaryBytes
from jaxfleet.analysis.memory.cuts import cut_positions
from jaxfleet.analysis.memory.live_ranges import fused_ranges, live_ranges
from jaxfleet.analysis.memory.stages import DonationPairs
from jaxfleet.errors import PassError
from jaxfleet.ir import Program, parse
from jaxfleet.passes import Recompute
from jaxfleet.testing import docstring_programs
from tests.analysis.memory import steps

Span = tuple[int, int, int]


def test_layers_that_repeat_are_cut_at_the_same_place() -> None:
    layer = [8, 40, 32, 48, 40, 16, 24, 8]  # dips at 2 and at 5; 7 equals the next layer's 0
    crossing = np.array(layer * 40, np.int64)
    for most, places in ((200, {0, 2, 5}), (100, {0}), (30, {0})):
        found = cut_positions(crossing, most=most)
        assert len(found) <= most
        assert {position % len(layer) for position in found[:-1]} == places
    assert {after - before for before, after in pairwise(found[1:-1])} == {2 * len(layer)}


def test_every_position_is_a_stage_where_there_are_few() -> None:
    assert cut_positions(np.array([9, 1, 5, 7]), most=8) == [0, 1, 2, 3]


def drawn(rng: random.Random, stages: int) -> list[Span]:
    spans = []
    for _ in range(30):
        begins = rng.randrange(stages)
        spans.append((begins, rng.randrange(begins, stages), rng.randint(1, 9)))
    return spans


def test_sums_over_groups_are_those_of_going_through_the_values() -> None:
    stages, rng = 7, random.Random(0)
    spans = drawn(rng, stages)
    own = np.array([rng.randint(0, 9) for _ in range(stages)])
    sums = IntervalSums(stages, spans)
    inside, leaving, entering = sums.inside(), sums.leaving(), sums.entering()
    peaks = sums.peak_inside(own)
    for p in range(stages):
        for c in range(p + 1, stages + 1):
            assert inside[p, c] == sum(x for b, e, x in spans if p <= b and e < c)
            assert leaving[p, c] == sum(x for b, e, x in spans if p <= b < c <= e)
            assert entering[p, c] == sum(x for b, e, x in spans if b < p <= e)
            held = [
                own[at] + sum(x for b, e, x in spans if p <= b <= at <= e < c) for at in range(p, c)
            ]
            assert peaks[p, c] == max(held)
            assert reversed_table(inside)[stages - c, stages - p] == inside[p, c]


@pytest.mark.parametrize("net", [steps.residual, steps.u_net, steps.branches])
def test_tables_say_what_going_through_a_group_says(net: object) -> None:
    assert callable(net)
    chain = stages_of(steps.program_of(net(random.Random(5), 3)), {})
    forward = chain.forward
    for level in chain.levels[::5]:
        for p in range(chain.stages):
            for c in range(p + 1, chain.stages + 1):
                need = RecomputeNeeds(forward, p, level.stored)
                for _ in range(p, c):
                    need.add_stage()
                assert (need.again_cost, need.saved_bytes) == (level.again[p, c], level.saved[p, c])
                # Recomputation finds all its inputs: kept, recomputed, or from an earlier group.
                there = {n for n, span in enumerate(forward.values) if span.begins < p}
                there |= {n for n, span in enumerate(forward.values) if span.ends >= c}
                there |= need.saved | {n for n, op in enumerate(forward.maker) if op in need.again}
                assert all(there.issuperset(forward.reads[op]) for op in need.again)


def with_momentum() -> Program:
    """Returns the step of `recompute`'s docstring, whose first parameter has a momentum."""
    ((text, _),) = docstring_programs(Recompute)
    update = "old: f32[4] = jax.mul(m, 0.9:f32)\nm = jax.add(old, v@GRAD)\nv = jax.sub(v, m)"
    text = text.replace("v = jax.sub(v, v@GRAD)", update)
    return parse(text.replace("param w: f32[4]", "param w: f32[4]\nstate m: f32[4]"))


def test_operators_behind_forward_run_as_soon_as_what_they_read_is_there() -> None:
    phases = schedule_constraints(with_momentum())
    assert phases.forward == (0, 1, 2, 3)
    gradients = {4: 3, 5: 3, 6: 2, 7: 2}
    # v is read by operator 0, which may be rerun; values derived from m wait for v@GRAD.
    assert phases.at == {**gradients, 8: 2, 9: 2, 10: 0, 11: 3}


def test_a_gradient_that_waits_for_a_norm_is_held() -> None:
    net = steps.chain(random.Random(3), 12)
    alone, waits = (stages_of(steps.program_of(net, clips=clips), {}) for clips in (False, True))
    held = waits.backward - alone.backward
    parameters = len(net.params) * 3 * steps.FLOAT
    assert held[1, 2] >= parameters - 3 * steps.FLOAT  # the last one is present in both
    assert held[11, 12] == 0


def test_what_goes_element_by_element_takes_no_bytes_inside_an_executable() -> None:
    program = parse("""
    program p
      data  x: f32[8,8]
      block 0
        forward
          a: f32[8,8] = jax.dot_general(x, x) {dimension_numbers=[[[1], [0]], [[], []]]}
          b: f32[8,8] = jax.add(a, 1.0:f32)
          t: f32[8,8] = jax.tanh(b)
          u: f32[8,8] = jax.tanh(b)
          c: f32[8,8] = jax.mul(t, u)
          d: f32[8,8] = jax.mul(t, b)
          e: f32[8,8] = jax.dot_general(c, d) {dimension_numbers=[[[1], [0]], [[], []]]}
    """)
    found = {
        v.name: v for v in fused_ranges(program, live_ranges(program, TemporaryBytes(program, {})))
    }
    # t is not worth two tanh, and products read memory; b and u are recomputed where read.
    assert [name for name, value in found.items() if value.bytes] == ["a", "t", "c", "d", "e"]
    assert found["a"].reads == (2, 4, 5)


def test_a_step_without_forward_operators_has_no_stages() -> None:
    program = parse("program p\n  block 0\n")
    with pytest.raises(PassError, match="no forward operators"):
        stages_of(program, {})


def test_a_letter_without_a_number_is_named() -> None:
    with pytest.raises(PassError, match=r"'h' is f32\[b\], and a size has no number: .*b"):
        stages_of(
            parse("""
            program p
              data  x: f32[b]
              block 0
                forward
                  h: f32[b] = jax.neg(x)
            """),
            {},
        )


def test_what_is_there_until_a_stage_counts_that_long() -> None:
    stages, rng = 6, random.Random(1)
    until = []
    for begins, ends, size in drawn(rng, stages):
        until.append((begins, ends, rng.randint(begins, ends), size))
    spans, own = drawn(rng, stages), np.array([rng.randint(0, 9) for _ in range(stages)])
    peaks = IntervalSums(stages, spans).peak_inside(own, until)
    for p in range(stages):
        for c in range(p + 1, stages + 1):
            held = [
                own[at]
                + sum(x for b, e, x in spans if p <= b <= at <= e < c)
                + sum(x for b, e, last, x in until if p <= b and e < c and at <= last)
                for at in range(p, c)
            ]
            assert peaks[p, c] == max(held)


def test_a_gradient_may_leave_where_one_came_in_that_was_read_before() -> None:
    count, rng = 6, random.Random(2)
    values = []
    for begins, ends, _ in drawn(rng, count)[:8]:
        values.append((begins, ends, rng.random() < 0.5))
    spans = DonationPairs(count)
    for begins, ends, in_place in values:
        spans.add(begins, ends, in_place=in_place)
    pairs = spans.pairs()
    for p in range(count):
        for c in range(p + 1, count + 1):
            comes_in = [e for b, e, _ in values if b < p <= e]
            goes_out = [b if at else b - 1 for b, e, at in values if p <= b < c <= e]
            assert pairs[p, c] == any(last <= made for last in comes_in for made in goes_out)
