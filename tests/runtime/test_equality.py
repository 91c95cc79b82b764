"""N devices compute what one device computes with the whole batch."""

from itertools import cycle

import pytest

import jaxfleet as jf
from tests.runtime.comparing import (
    assert_close,
    assert_equal,
    distributed,
    on_one_device,
    tolerance,
)
from tests.zoo import ZOO, having, lacking

STEPS = 5
MANY_STEPS = 20
ELSEWHERE = {  # why an entry is not compared here
    "rbg": "draws other numbers on each device: test_randomness.py",
}
CORE = [entry.name for entry in having("core")]
OTHERS = [entry.name for entry in lacking("core") if entry.name not in ELSEWHERE]


def compare(name: str, devices: int, steps: int) -> None:
    """Fails unless devices compute what the plain function does: one of them bit by bit."""
    wanted = on_one_device(name, steps)
    found = distributed(name, steps, jf.DistributedStrategy(devices=devices))
    for number, result in enumerate(found):
        if devices == 1:
            assert_equal(result, wanted[number], f"after step {number}")
        else:
            allowed = tolerance(ZOO[name])
            assert_close(result, wanted[number], allowed, f"after step {number}")


@pytest.mark.parametrize("name", CORE)
def test_one_device_is_bitwise_the_plain_function(name: str) -> None:
    compare(name, 1, STEPS)


@pytest.mark.parametrize(("name", "devices"), [*zip(CORE, cycle([2, 8]), strict=False)])
def test_devices_compute_what_one_does(name: str, devices: int) -> None:
    compare(name, devices, STEPS)


@pytest.mark.parametrize("name", OTHERS)
def test_the_one_device_meaning_holds_on_four_devices(name: str) -> None:
    compare(name, 4, STEPS)


@pytest.mark.optimized
@pytest.mark.parametrize(("name", "devices"), [("mlp", 1), ("lion", 2), ("dropout", 4)])
def test_devices_compute_what_one_does_with_all_of_xlas_optimizations(
    name: str, devices: int
) -> None:
    compare(name, devices, STEPS)


@pytest.mark.grid
@pytest.mark.optimized
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("name", CORE)
def test_devices_compute_what_one_does_for_many_steps(name: str, devices: int) -> None:
    compare(name, devices, MANY_STEPS)


@pytest.mark.grid
@pytest.mark.optimized
@pytest.mark.parametrize("name", OTHERS)
def test_the_one_device_meaning_holds_with_all_of_xlas_optimizations(name: str) -> None:
    compare(name, 4, STEPS)
