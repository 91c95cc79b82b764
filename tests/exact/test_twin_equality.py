"""Parameter servers compute what one device does, however a step is cut, placed and divided."""

from itertools import product

import pytest

from jaxfleet.runtime.twin import TwinResult
from tests.exact.choosing import pairwise
from tests.exact.common import (
    STEPS,
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
GRID = {
    "program": CORE,
    "servers": SERVERS,
    "size": SIZES,
    "dispatch": METHODS,
    "trainers": TRAINERS,
}
# Beyond the core: what each is for is in the zoo. Each meets the other options in turn.
OTHERS = (
    *("lamb", "lars", "adafactor", "muon", "clipping_outside", "freeze", "gan"),
    *("nnx_regularised", "embedding", "loss_scaling", "rbg", "multisteps_outside"),
)
MORE = tuple(name for name in ZOO if name not in {*CORE, *OTHERS})  # in the grid alone


def chosen() -> list[tuple[str, Cut]]:
    """Returns the cases of the default run."""
    found = [(str(name), Cut(*cut)) for name, *cut in pairwise(GRID)]  # type: ignore[arg-type]
    for turn, name in enumerate(OTHERS):
        servers, size = SERVERS[1 + turn % 3], SIZES[1 + turn // 3 % 3]
        found.append((name, Cut(servers, size, METHODS[turn % 3], TRAINERS[1 + turn % 2])))
    return found


def whole_grid() -> list[tuple[str, Cut]]:
    """Returns every case."""
    programs = (*CORE, *OTHERS, *MORE)
    cuts = [Cut(*cut) for cut in product(SERVERS, SIZES, METHODS, TRAINERS)]
    return [*product(programs, cuts)]


def check(name: str, cut: Cut, result: TwinResult) -> None:
    for trainer in range(1, cut.trainers):
        assert_same(result.states[trainer], result.states[0], f"on trainer {trainer}")
        assert_same(result.metrics[trainer], result.metrics[0], f"on trainer {trainer}")
    assert_near_one_device(name, result.states[0], result.metrics[0])
    assert_same(result.states[0], on_one_server(name, cut.trainers), "against one server")


@pytest.mark.parametrize(("name", "cut"), chosen(), ids=str)
def test_the_result_is_that_of_one_device_however_the_step_is_cut(name: str, cut: Cut) -> None:
    check(name, cut, run(name, cut))


@pytest.mark.grid
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "cut"), whole_grid(), ids=str)
def test_the_result_is_that_of_one_device_in_the_whole_grid(name: str, cut: Cut) -> None:
    check(name, cut, run(name, cut))


def test_every_two_values_of_two_options_meet_in_a_case() -> None:
    cases = pairwise(GRID)
    for one, other in product(range(len(GRID)), repeat=2):
        if one < other:
            met = {(case[one], case[other]) for case in cases}
            values = list(GRID.values())
            assert met == set(product(values[one], values[other]))
    assert len(cases) < 70
    assert STEPS == 20
