"""Parameter servers match one device, for any slicing, placement and number of trainers."""

from collections.abc import Mapping, Sequence
from itertools import product

import pytest

from jaxfleet.runtime.simulated_job import TwinResult
from tests.exact.choosing import pairwise
from tests.exact.common import (
    LONGEST,
    Cut,
    Method,
    assert_near_one_device,
    assert_same,
    on_one_server,
    run,
)
from tests.zoo import ZOO, having

CORE = tuple(entry.name for entry in having("core"))
SERVERS, SIZES, TRAINERS = (1, 2, 3, 7), (0, 1, 16, 64), (1, 2, 4)
METHODS: tuple[Method, ...] = ("round_robin", "hash_name", "balanced")
WIDE = {
    "program": CORE,
    "servers": SERVERS,
    "size": SIZES,
    "dispatch": METHODS,
    "trainers": TRAINERS,
}
NARROW = {"servers": (2, 3), "size": (0, 1, 16), "dispatch": METHODS, "trainers": (1, 2)}
# Beyond the core: the zoo states the purpose of each. Each occurs with the other options in turn.
OTHERS = (
    *("lamb", "lars", "adafactor", "muon", "clipping_outside", "freeze", "gan"),
    *("nnx_regularised", "embedding", "loss_scaling", "rbg", "multisteps_outside"),
)
QUICK_OTHERS = ("lamb", "clipping_outside", "freeze", "gan", "embedding", "loss_scaling")
MORE = tuple(name for name in ZOO if name not in {*CORE, *OTHERS})  # only in the grid
# Compiled as users' programs: slices, vectors and whole arrays that round alike.
OPTIMIZED = (
    ("mlp", Cut(3, 16, "round_robin", 2)),
    ("lion", Cut(2, 1, "hash_name", 4)),
    ("aux_metrics", Cut(7, 64, "balanced", 2)),
)


def few() -> list[tuple[str, Cut]]:
    """Returns a cut of each program of the core, and some others: some of them run by default."""
    cuts = [Cut(*cut) for cut in pairwise(NARROW)]  # type: ignore[arg-type]
    core = [(name, cuts[number % len(cuts)]) for number, name in enumerate(CORE)]
    return [*core, *(case for case in of_others() if case[0] in QUICK_OTHERS)]


def many() -> list[tuple[str, Cut]]:
    """Returns cases that cover every two options, programs of the core included."""
    found = [(str(name), Cut(*cut)) for name, *cut in pairwise(WIDE)]  # type: ignore[arg-type]
    return [*found, *of_others()]


def of_others() -> list[tuple[str, Cut]]:
    """Returns a case of each other program."""
    found = []
    for turn, name in enumerate(OTHERS):
        servers, size = SERVERS[1 + turn % 3], SIZES[1 + turn // 3 % 3]
        found.append((name, Cut(servers, size, METHODS[turn % 3], TRAINERS[1 + turn % 2])))
    return found


def check(name: str, cut: Cut, result: TwinResult) -> None:
    for trainer in range(1, cut.trainers):
        assert_same(result.states[trainer], result.states[0], f"on trainer {trainer}")
        assert_same(result.metrics[trainer], result.metrics[0], f"on trainer {trainer}")
    assert_near_one_device(name, result.states[0], result.metrics[0])
    wanted = on_one_server(name, cut.trainers, len(result.metrics[0]))
    assert_same(result.states[0], wanted, "against one server")


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "cut"), few(), ids=str)
def test_the_result_is_that_of_one_device_however_the_step_is_cut(name: str, cut: Cut) -> None:
    check(name, cut, run(name, cut))


@pytest.mark.grid
@pytest.mark.optimized
@pytest.mark.parametrize(("name", "cut"), OPTIMIZED, ids=str)
def test_the_result_is_that_of_one_device_with_all_of_xlas_optimizations(
    name: str, cut: Cut
) -> None:
    check(name, cut, run(name, cut))


@pytest.mark.grid
@pytest.mark.optimized
@pytest.mark.parametrize(("name", "cut"), many(), ids=str)
def test_the_result_stays_that_of_one_device_for_twenty_steps(name: str, cut: Cut) -> None:
    check(name, cut, run(name, cut, steps=LONGEST))


@pytest.mark.parametrize("options", [NARROW, WIDE], ids=["narrow", "wide"])
def test_every_two_values_of_two_options_meet_in_a_case(
    options: Mapping[str, Sequence[object]],
) -> None:
    cases = pairwise(options)
    for one, other in product(range(len(options)), repeat=2):
        if one < other:
            met = {(case[one], case[other]) for case in cases}
            values = list(options.values())
            assert met == set(product(values[one], values[other]))
    assert len(cases) < 70
