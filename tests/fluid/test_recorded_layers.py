"""Layers against fluid 1.8.5's results for the same inputs, gradients included."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxfleet import fluid
from tests.fluid.layer_cases import CASES, run

RECORDED: dict[str, Any] = json.loads(
    Path(__file__).with_name("conformance").joinpath("layer_cases.json").read_text()
)


def test_every_case_is_recorded() -> None:
    assert set(RECORDED) == set(CASES)


def _listed() -> list[Any]:
    """Names of cases; most sizes and modes of resizing are left to the grid."""
    dear = [n for n in CASES if n.startswith("resize") and not n.endswith(("smaller", "mode 0"))]
    return [pytest.param(n, marks=pytest.mark.grid if n in dear else ()) for n in sorted(CASES)]


@pytest.mark.few(5)
@pytest.mark.parametrize("name", _listed())
def test_a_layer_makes_what_fluid_makes(name: str) -> None:
    wanted, made = RECORDED[name], run(fluid, CASES[name])
    assert len(made["outputs"]) == len(wanted["outputs"])
    for one, other in zip(made["outputs"], wanted["outputs"], strict=True):
        _compare(one, other, name)
    assert made["gradients"].keys() == wanted["gradients"].keys()
    for argument, gradient in wanted["gradients"].items():
        _compare(made["gradients"][argument], gradient, f"{name}: {argument}@GRAD")


def _compare(made: dict[str, Any], wanted: dict[str, Any], what: str) -> None:
    """Compares to 2e-6 of the largest element: sums have another order in fluid."""
    assert made["shape"] == wanted["shape"], what
    assert made["lengths"] == wanted["lengths"], what
    values = np.asarray(wanted["values"])
    scale = max(1.0, np.abs(values).max(initial=0))
    np.testing.assert_allclose(made["values"], values, rtol=0, atol=2e-6 * scale, err_msg=what)
