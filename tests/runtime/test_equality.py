"""N devices compute what one device computes with the whole batch."""

import pytest

import jaxfleet as jf
from tests.runtime.comparing import (
    assert_close,
    assert_equal,
    distributed,
    on_one_device,
    tolerance,
)
from tests.zoo import Case, having, lacking

STEPS = 20
FEW_STEPS = 5
ELSEWHERE = {  # why an entry is not compared here
    "rbg": "draws other numbers on each device: test_randomness.py",
}


def core() -> list[object]:
    return [pytest.param(entry, id=entry.name) for entry in having("core")]


def others() -> list[object]:
    entries = [entry for entry in lacking("core") if entry.name not in ELSEWHERE]
    return [pytest.param(entry, id=entry.name) for entry in entries]


@pytest.mark.parametrize("entry", core())
def test_one_device_is_bitwise_the_plain_function(entry: Case) -> None:
    wanted = on_one_device(entry.name, STEPS)
    found = distributed(entry.name, STEPS, jf.DistributedStrategy(devices=1))
    for number, result in enumerate(found):
        assert_equal(result, wanted[number], f"after step {number}")


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("entry", core())
def test_devices_compute_what_one_does(entry: Case, devices: int) -> None:
    wanted = on_one_device(entry.name, STEPS)
    found = distributed(entry.name, STEPS, jf.DistributedStrategy(devices=devices))
    for number, result in enumerate(found):
        assert_close(result, wanted[number], tolerance(entry), f"after step {number}")


@pytest.mark.parametrize("entry", others())
def test_the_one_device_meaning_holds_on_four_devices(entry: Case) -> None:
    wanted = on_one_device(entry.name, FEW_STEPS)
    found = distributed(entry.name, FEW_STEPS, jf.DistributedStrategy(devices=4))
    for number, result in enumerate(found):
        assert_close(result, wanted[number], tolerance(entry), f"after step {number}")
