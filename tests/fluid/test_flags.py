"""Flags are stored and returned."""

from typing import Any

import pytest

from jaxfleet import fluid
from jaxfleet.errors import ProgramError
from jaxfleet.fluid import flags


@pytest.fixture(autouse=True)
def _own_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "_FLAGS", dict(flags._FLAGS))


def test_a_flag_is_given_back() -> None:
    name = "FLAGS_eager_delete_tensor_gb"
    assert fluid.get_flags(name) == {name: 0.0}
    fluid.set_flags({name: 1.0})
    assert fluid.get_flags([name, "FLAGS_benchmark"]) == {name: 1.0, "FLAGS_benchmark": False}


def test_a_flag_that_nobody_knows_is_kept_with_a_warning() -> None:
    with pytest.raises(ProgramError, match="no flag FLAGS_of_mine"):
        fluid.get_flags(["FLAGS_of_mine"])
    with pytest.warns(UserWarning, match="no flag FLAGS_of_mine"):
        fluid.set_flags({"FLAGS_of_mine": 3})
    assert fluid.get_flags("FLAGS_of_mine") == {"FLAGS_of_mine": 3}


@pytest.mark.parametrize("given", [["FLAGS_benchmark"], "FLAGS_benchmark", None])
def test_flags_are_set_by_a_dict(given: Any) -> None:
    with pytest.raises(TypeError, match=r"what set_flags takes is of type \w+, not Mapping"):
        fluid.set_flags(given)


def test_flags_are_asked_for_by_name() -> None:
    with pytest.raises(TypeError, match="what get_flags takes is of type"):
        fluid.get_flags(3)  # type: ignore[arg-type]


def test_flags_are_one_mapping_by_the_core() -> None:
    flags = fluid.core.globals()
    old = flags["FLAGS_rpc_deadline"]
    flags["FLAGS_rpc_deadline"] = 5000
    try:
        assert fluid.get_flags("FLAGS_rpc_deadline") == {"FLAGS_rpc_deadline": 5000}
        assert "FLAGS_rpc_deadline" in set(flags)
        assert len(flags) == len(list(flags))
        with pytest.raises(ValueError, match="cannot be taken away"):
            del flags["FLAGS_rpc_deadline"]
    finally:
        flags["FLAGS_rpc_deadline"] = old
