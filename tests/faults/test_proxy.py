"""Real sockets through a proxy that resets, swallows, truncates and flips, holds and slows down."""

import time

import pytest

from jaxfleet.transport.zmq.sockets import Timing
from tests.faults.proxied_jobs import WIDE, job

SECRET = b"0123456789abcdef"
LOST_S = 10.0  # the default
MOST_S = 2 * LOST_S  # that a fault may cost


@pytest.mark.few(3)
@pytest.mark.parametrize("harm", ["reset", "swallow", "truncate"])
@pytest.mark.parametrize("way", ["request", "answer"])
def test_bytes_that_are_lost_with_a_connection_are_asked_for_again(way: str, harm: str) -> None:
    with job() as trainers:
        if way == "answer":
            trainers.push()
        trainers.proxy.next(way, harm)
        if way == "request":
            trainers.push()
        trainers.pull()
        assert trainers.proxy.harms == 1
        trainers.push()
        trainers.pull()


def test_a_push_that_is_lost_on_its_way_does_not_hold_up_the_other_trainer() -> None:
    with job() as trainers:
        trainers.other_proxy.next("request", "reset")
        trainers.push()
        trainers.pull()
        assert trainers.other_proxy.harms == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["request", "answer"])
def test_a_bit_that_is_flipped_under_curve_costs_a_connection_and_no_more(way: str) -> None:
    with job(SECRET) as trainers:
        if way == "answer":
            trainers.push()
        trainers.proxy.next(way, "flip")
        if way == "request":
            trainers.push()
        trainers.pull()
        assert trainers.proxy.harms == 1
        trainers.push()
        trainers.pull()


@pytest.mark.grid
def test_a_cut_may_last_longer_than_a_connection() -> None:
    with job() as trainers:
        with trainers.proxy.cut():
            trainers.push()
            time.sleep(1.5)
        trainers.pull()


@pytest.mark.grid
def test_a_cut_of_45_s_ends_no_wait() -> None:
    with job(timing=Timing()) as trainers:
        with trainers.proxy.cut():
            trainers.push()
            time.sleep(45.0)
        trainers.pull()


@pytest.mark.grid
@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("way", ["request", "answer"])
@pytest.mark.parametrize("harm", ["reset", "swallow", "truncate", "flip"])
def test_harm_at_any_place_is_made_good(harm: str, way: str, secret: bytes | None) -> None:
    if harm == "flip" and secret is None:
        pytest.skip("nothing but the secret protects a bit")
    with job(secret) as trainers:
        for least in (1, 20, 64, 200, 1000):
            trainers.proxy.next(way, harm, least)
            trainers.push()
            trainers.pull()


@pytest.mark.grid
def test_a_handshake_that_is_lost_costs_no_peer() -> None:
    with job(timing=Timing(), lost_s=LOST_S) as trainers:
        trainers.proxy.lose_all(later=len(trainers.ends))  # the heartbeats, which connect first
        trainers.push()
        trainers.pull(MOST_S)


@pytest.mark.grid
@pytest.mark.parametrize("way", ["request", "answer"])
def test_half_open_lines_cost_at_most_twice_the_silence_of_a_lost_peer(way: str) -> None:
    with job(timing=Timing(), lost_s=LOST_S) as trainers:
        if way == "answer":
            trainers.push()
        trainers.proxy.lose_all()
        if way == "request":
            trainers.push()
        trainers.pull(MOST_S)
        trainers.push()
        trainers.pull(MOST_S)


@pytest.mark.grid
def test_a_network_that_holds_everything_for_10_s_ends_no_wait() -> None:
    with job(timing=Timing(), lost_s=2 * LOST_S) as trainers:
        with trainers.proxy.held():
            trainers.push()
            time.sleep(10.0)
        trainers.pull(MOST_S)


@pytest.mark.grid
@pytest.mark.parametrize("seed", range(3))
def test_a_line_that_swallows_a_twentieth_ends_no_wait(seed: int) -> None:
    # Without heartbeats: of those, so many may be lost that the peer is.
    with job() as trainers:
        with trainers.proxy.losing(0.05, seed):
            for _ in range(30):
                trainers.push()
                trainers.pull()
        assert trainers.proxy.harms > 0


@pytest.mark.grid
def test_a_slow_line_is_waited_for() -> None:
    with job(timing=Timing(), model=WIDE, lost_s=3.0) as trainers:
        trainers.proxy.bytes_per_s = 30_000  # 200 KB each way, for two trainers: 13 s at least
        for _ in range(2):
            trainers.push()
            trainers.pull()
