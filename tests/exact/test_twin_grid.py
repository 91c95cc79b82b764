"""Parameter servers match one device with every cut of the core, and pairs of cuts of the rest.

A file of its own, because xdist's `loadfile` gives each file to one worker.
"""

from collections.abc import Sequence
from itertools import product

import pytest

from tests.exact.choosing import pairwise
from tests.exact.common import Cut, run
from tests.exact.test_twin_equality import (
    CORE,
    METHODS,
    MORE,
    OTHERS,
    SERVERS,
    SIZES,
    TRAINERS,
    WIDE,
    check,
)

pytestmark = [pytest.mark.grid, pytest.mark.optimized, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("trainers", TRAINERS)
@pytest.mark.parametrize("name", CORE)
def test_the_result_is_that_of_one_device_in_the_whole_grid(name: str, trainers: int) -> None:
    check_all(name, [Cut(*cut, trainers) for cut in product(SERVERS, SIZES, METHODS)])


@pytest.mark.parametrize("name", [*OTHERS, *MORE])
def test_every_two_options_of_a_cut_give_the_result_of_one_device(name: str) -> None:
    options = {key: values for key, values in WIDE.items() if key != "program"}
    check_all(name, [Cut(*cut) for cut in pairwise(options)])  # type: ignore[arg-type]


def check_all(name: str, cuts: Sequence[Cut]) -> None:
    """Checks a program with several cuts; an error names the cut."""
    for cut in cuts:
        try:
            check(name, cut, run(name, cut))
        except Exception as error:
            error.add_note(f"of {name}, {cut}")
            raise
