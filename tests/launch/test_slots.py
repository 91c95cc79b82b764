"""Which ranks a start has after a loss: decisions without processes."""

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxfleet.errors import StrategyError
from jaxfleet.launch import CollectiveJob, Nodes
from jaxfleet.launch.slots import RankEnd, Slots, lost_ranks


def test_a_rank_that_is_lost_is_left_out() -> None:
    slots = Slots(most=4, least=1)
    assert slots.left == (0, 1, 2, 3)
    slots = slots.without([1])
    assert slots.left == (0, 2, 3)
    assert slots.without([1, 2]).left == (0,)  # ranks 1 and 2 of that start: slots 2 and 3


def test_there_are_never_fewer_ranks_than_the_least_number() -> None:
    slots = Slots(most=3, least=2).without([0]).without([1])
    assert slots.left == (0, 1)  # slot 0, lost longest ago, is used again
    assert Slots(most=2, least=2).without([1]).left == (0, 1)
    assert Slots(most=2, least=2).without([0, 1]).left == (0, 1)


@hypothesis.given(st.data(), st.integers(1, 6))
def test_slots_stay_within_their_bounds(data: st.DataObject, most: int) -> None:
    least = data.draw(st.integers(1, most))
    slots = Slots(most, least)
    for _ in range(5):
        ranks = data.draw(st.sets(st.integers(0, len(slots.left) - 1)))
        after = slots.without(sorted(ranks))
        assert least <= len(after.left) <= len(slots.left)
        assert len(after.left) == max(least, len(slots.left) - len(ranks))
        if len(slots.left) - len(ranks) >= least:
            assert not {slots.left[rank] for rank in ranks} & set(after.left)
        slots = after


def test_the_first_to_fail_and_those_that_were_killed_are_lost() -> None:
    first, killed, wanting = (
        RankEnd(is_first=True), RankEnd(was_killed=True), RankEnd(lacks_peer=True)
    )  # fmt: skip
    assert lost_ranks([RankEnd(), first, RankEnd()]) == (1,)
    assert lost_ranks([wanting, first, killed]) == (1, 2)
    assert lost_ranks([RankEnd(was_killed=True, is_first=True), wanting]) == (0,)


def test_a_rank_that_fails_for_want_of_another_is_not_lost() -> None:
    # The lost one is on another machine, or hangs.
    assert lost_ranks([RankEnd(is_first=True, lacks_peer=True), RankEnd()]) == ()


def test_least_numbers_are_checked() -> None:
    nodes = Nodes(("a", "b"), "a")
    for options, what in (
        ({"nproc": 2, "min_nproc": 3}, "min_nproc is 3"),
        ({"nproc": 2, "min_nproc": 0}, "min_nproc is 0"),
        ({"min_nodes": 2}, "min_nodes is 2"),
        ({"nodes": nodes, "insecure": True, "min_nodes": 0}, "min_nodes is 0"),
        ({"nproc": 2, "min_nproc": 1, "max_restarts": 0}, "a job that never starts again"),
    ):
        settings = {"command": ("x",), "max_restarts": 1, **options}
        with pytest.raises(StrategyError, match=what):
            CollectiveJob(**settings)  # type: ignore[arg-type]


def test_launches_meet_only_if_machines_or_their_ranks_may_be_fewer() -> None:
    two = {"nodes": Nodes(("a", "b"), "a"), "insecure": True}
    for options, meets in (
        ({"nproc": 4, "min_nproc": 1}, False),
        (two, False),
        ({**two, "min_nodes": 1}, True),
        ({**two, "nproc": 2, "min_nproc": 1}, True),
    ):
        job = CollectiveJob(command=("x",), max_restarts=1, **options)
        assert job.meets == meets, options
