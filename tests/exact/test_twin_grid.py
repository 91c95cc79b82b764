"""Parameter servers match one device with cuts of which every two options meet.

A file of its own, because xdist's `loadfile` gives each file to one worker. Slicing, placement and
the numbers of servers and trainers interact in pairs; the product of all options, 144 cuts of each
program of the core, would take longer than all other tests together. `test_twin_equality.py` has
cuts of the core that are compiled with all of XLA's optimizations.
"""

from collections.abc import Sequence

import pytest

from tests.exact.choosing import pairwise
from tests.exact.common import Cut, run
from tests.exact.test_twin_equality import CORE, MORE, OTHERS, WIDE, check

pytestmark = [pytest.mark.grid, pytest.mark.timeout(1200)]

CUTS = [
    Cut(*cut)  # type: ignore[arg-type]
    for cut in pairwise({key: values for key, values in WIDE.items() if key != "program"})
]
REST = (*OTHERS, *MORE)
# A program of the core has every second cut, another every eighth; its neighbours have the others.
OF_CORE, OF_REST = 2, 8


@pytest.mark.parametrize("name", CORE)
def test_every_two_options_of_a_cut_give_the_result_of_one_device(name: str) -> None:
    check_all(name, CUTS[CORE.index(name) % OF_CORE :: OF_CORE])


@pytest.mark.parametrize("name", REST)
def test_some_cuts_of_every_other_program_give_the_result_of_one_device(name: str) -> None:
    check_all(name, CUTS[REST.index(name) % OF_REST :: OF_REST])


def check_all(name: str, cuts: Sequence[Cut]) -> None:
    """Checks a program with several cuts; an error names the cut."""
    for cut in cuts:
        try:
            check(name, cut, run(name, cut))
        except Exception as error:
            error.add_note(f"of {name}, {cut}")
            raise
