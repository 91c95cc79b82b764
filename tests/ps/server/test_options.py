"""A server's timeouts are configured, or taken from the first trainer."""

import math

import pytest

from jaxfleet.errors import StrategyError
from jaxfleet.ps.server import ServerOptions
from jaxfleet.transport.messages import Plain

TOLD: dict[str, Plain] = {"lost_after_s": 2.0, "step_timeout_s": 30}


def test_the_trainers_times_are_taken_where_the_server_has_none() -> None:
    found = ServerOptions(as_trainers_say=True).after_hello(TOLD)
    assert (found.lost_after_s, found.step_timeout_s) == (2.0, 30.0)
    assert found.after_hello({"lost_after_s": 99.0}) == found  # the first one's count


def test_times_that_were_given_stay() -> None:
    given = ServerOptions(lost_after_s=5.0)
    assert given.after_hello(TOLD) == given


@pytest.mark.parametrize("value", [None, True, "2", -1.0, 0, math.inf, math.nan, [2.0]])
def test_what_is_no_time_is_passed_over(value: Plain) -> None:
    found = ServerOptions(as_trainers_say=True).after_hello({"lost_after_s": value})
    assert found.lost_after_s == ServerOptions.lost_after_s


@pytest.mark.parametrize("seconds", [0.0, -3.0, math.nan])
@pytest.mark.parametrize("name", ["lost_after_s", "step_timeout_s"])
def test_a_time_that_is_none_is_refused_where_it_is_given(name: str, seconds: float) -> None:
    with pytest.raises(StrategyError, match=f"a server's {name} is {seconds}"):
        ServerOptions(**{name: seconds})  # type: ignore[arg-type]  # seconds are no path
