"""`fluid.op.Operator` and `core.SelectedRows`: single operators over a scope."""

from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from jaxfleet.errors import ProgramError
from jaxfleet.fluid import core
from jaxfleet.fluid.op import Operator

PLACE = fluid.CPUPlace()


def scope_of(**arrays: Any) -> fluid.Scope:
    scope = fluid.Scope()
    for name, array in arrays.items():
        scope.var(name).get_tensor().set(np.asarray(array, np.float32), PLACE)
    return scope


def put_rows(scope: fluid.Scope, name: str, rows: list[int], height: int, values: Any) -> None:
    made = scope.var(name).get_selected_rows()
    made.set_rows(rows)
    made.set_height(height)
    made.get_tensor().set(np.asarray(values, np.float32), PLACE)


def read(scope: fluid.Scope, name: str) -> np.ndarray:
    found = scope.find_var(name)
    assert found is not None
    return np.array(found.get_tensor())


def test_an_operator_reads_and_writes_a_scope() -> None:
    scope = scope_of(w=[1.0, 2.0], g=[1.0, 1.0], rate=[0.5])
    sgd = Operator("sgd", Param="w", Grad="g", LearningRate="rate", ParamOut="w")
    sgd.run(scope, PLACE)
    np.testing.assert_allclose(read(scope, "w"), [0.5, 1.5])
    Operator(type="scale", X="w", Out="y", scale=2.0).run(scope, PLACE)
    np.testing.assert_allclose(read(scope, "y"), [1.0, 3.0])


@pytest.mark.parametrize("kind", ["sgd", "adagrad"])
def test_an_update_takes_the_rows_of_a_gradient(kind: str) -> None:
    whole = np.zeros((5, 2), np.float32)
    rows, values = [1, 3, 1], [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
    np.add.at(whole, rows, np.array(values, np.float32))
    results = []
    for is_rows in (True, False):
        scope = scope_of(w=np.ones((5, 2)), m=np.zeros((5, 2)), rate=[0.5])
        if is_rows:
            put_rows(scope, "g", rows, 5, values)
        else:
            scope.var("g").get_tensor().set(whole)
        slots = {"Param": "w", "Grad": "g", "LearningRate": "rate", "ParamOut": "w"}
        if kind == "adagrad":
            slots |= {"Moment": "m", "MomentOut": "m"}
        Operator(kind, **slots).run(scope, PLACE)
        results.append(read(scope, "w"))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6)
    assert (results[0][[0, 2, 4]] == 1).all()


def test_operators_that_give_rows_again() -> None:
    scope = fluid.Scope()
    put_rows(scope, "x", [4, 0, 4], 6, [[1.0], [2.0], [3.0]])
    Operator("scale", X="x", Out="y", scale=3.0).run(scope, PLACE)
    assert scope.var("y").get_selected_rows().rows() == [4, 0, 4]
    Operator("sum", X=["x", "y"], Out="z").run(scope, PLACE)
    total = scope.var("z").get_selected_rows()
    assert total.rows() == [4, 0, 4, 4, 0, 4]
    np.testing.assert_array_equal(total.to_array()[:, 0], [8, 0, 0, 0, 16, 0])


def test_rows_that_a_script_makes() -> None:
    made = core.SelectedRows([0, 4, 7], 10)
    made.get_tensor().set(np.arange(6, dtype=np.float32).reshape(3, 2), PLACE)
    made.sync_index()
    assert (made.rows(), made.height(), made.numel()) == ([0, 4, 7], 10, 6)
    assert made.to_array().shape == (10, 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"type": "no_such"}, "The operator: no_such is not registered"),
        ({"type": "sgd", "Nothing": "x"}, "operator 'sgd' has no 'Nothing'"),
        ({}, "an operator has one type"),
    ],
)
def test_an_operator_that_is_none_is_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Operator(**given)


def test_an_operator_names_what_has_no_value() -> None:
    with pytest.raises(ProgramError, match="'x' has no value in the scope"):
        Operator("scale", X="x", Out="y").run(fluid.Scope(), PLACE)


def test_a_factory_lists_slots_and_attributes() -> None:
    assert Operator.get_op_input_names("sgd") == ["Param", "Grad", "LearningRate"]
    assert Operator.get_op_output_names("sgd") == ["ParamOut"]
    assert "scale" in Operator.get_op_attr_names("scale")
