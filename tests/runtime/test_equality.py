"""N devices match one device, compiled with all of XLA's optimizations.

`tests/test_zoo.py` compares every program, compiled quickly; here some are compiled as users'
programs are, and in the grid all of them, the core for many steps.
"""

import pytest

from tests.runtime.comparing import ELSEWHERE, compare
from tests.tiers import grid
from tests.zoo import having, lacking

STEPS, MANY_STEPS = 5, 20
CORE = [entry.name for entry in having("core")]
OTHERS = [entry.name for entry in lacking("core") if entry.name not in ELSEWHERE]

pytestmark = pytest.mark.optimized


@pytest.mark.parametrize(("name", "devices"), [grid("mlp", 1), ("lion", 2), grid("dropout", 4)])
def test_devices_compute_what_one_does(name: str, devices: int) -> None:
    compare(name, devices, STEPS)


@pytest.mark.grid
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("name", CORE)
def test_devices_compute_what_one_does_for_many_steps(name: str, devices: int) -> None:
    compare(name, devices, MANY_STEPS)


@pytest.mark.grid
@pytest.mark.parametrize("name", OTHERS)
def test_the_one_device_meaning_holds_on_four_devices(name: str) -> None:
    compare(name, 4, STEPS)
