"""Scopes as scripts use them: variables by name, in one scope or in its parents."""

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import ProgramError
from jaxfleet.fluid import layers
from tests.fluid.nets import fresh


def value(scope: fluid.Scope, name: str) -> float:
    found = scope.find_var(name)
    assert found is not None
    return float(np.array(found.get_tensor())[0])


def floats(number: float) -> np.ndarray:
    return np.full(1, number, np.float32)


def test_a_variable_is_found_where_it_was_made_and_set_there() -> None:
    outer = fluid.Scope()
    inner = outer.new_scope()
    assert outer.kids == [inner]
    assert inner.find_var("w") is None
    outer.var("w")
    found = inner.find_var("w")
    assert found is not None
    assert (found.name(), found.get_tensor()._is_initialized()) == ("w", False)
    found.get_tensor().set(floats(3), fluid.CPUPlace())
    assert (value(outer, "w"), value(inner, "w")) == (3.0, 3.0)
    assert (outer.local_var_names(), inner.local_var_names()) == (["w"], [])
    outer.drop_kids()
    assert outer.kids == []


def test_a_variable_of_an_inner_scope_hides_the_outer_one() -> None:
    outer = fluid.Scope()
    outer.var("w").get_tensor().set(floats(3))
    inner = outer.new_scope()
    inner.var("w").get_tensor().set(floats(5))
    assert (value(outer, "w"), value(inner, "w")) == (3.0, 5.0)


def test_a_run_writes_a_variable_where_it_is_found() -> None:
    outer = fluid.Scope()
    outer.var("w").get_tensor().set(floats(3))
    inner = outer.new_scope()
    with fresh() as (main, _):
        w = layers.create_global_var([1], 0.0, "float32", name="w")
        layers.assign(w * 2.0, w)
    exe = fluid.Executor()
    exe.run(main, scope=inner)
    assert (value(outer, "w"), inner.local_var_names()) == (6.0, [])
    inner.var("w").get_tensor().set(floats(1))
    exe.run(main, scope=inner)
    assert (value(outer, "w"), value(inner, "w")) == (6.0, 2.0)


def test_a_tensor_tells_what_it_holds() -> None:
    tensor = fluid.Scope().var("w").get_tensor()
    assert tensor.shape() == []
    with pytest.raises(ProgramError, match="'w' has no value yet"):
        np.array(tensor)
    tensor.set(np.zeros((2, 3), np.float32))
    assert (tensor.shape(), tensor._dtype(), len(tensor), tensor.lod()) == (
        [2, 3],
        "float32",
        2,
        [],
    )
