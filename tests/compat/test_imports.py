"""Modules of paddle other than fluid that scripts import."""

import math
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest

import jaxfleet.compat
from jaxfleet.compat import text
from jaxfleet.errors import ProgramError


@pytest.fixture
def paddle() -> Iterator[ModuleType]:
    jaxfleet.compat.install()
    yield sys.modules["paddle"]
    jaxfleet.compat.uninstall()


def test_dygraph_is_imported_and_refused_where_it_would_run(paddle: ModuleType) -> None:
    dygraph = import_module("paddle.fluid.dygraph")
    layer = import_module("paddle.fluid.dygraph.nn").Linear
    assert not dygraph.enabled()
    model = type("Model", (dygraph.Layer,), {})  # a script's class, created at import
    for use in (dygraph.guard, lambda: layer(3, 4), model):
        with pytest.raises(ProgramError, match=r"cannot run as they are written") as found:
            use()
        assert "Executor" in str(found.value.__notes__)
    with pytest.raises(ProgramError, match=r"fluid\.dygraph\.Layer"):
        model()
    with pytest.raises(AttributeError, match="Lineer"):
        dygraph.Lineer  # noqa: B018  # a name that fluid has not either


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("paddle.fluid.communicator", "Communicator"),
        ("paddle.fluid.transpiler.geo_sgd_transpiler", "GeoSgdTranspiler"),
        ("paddle.fluid.dygraph.base", "to_variable"),
        ("paddle.fluid.dygraph.parallel", "DataParallel"),
        ("paddle.fluid.layers.device", "get_places"),
        ("paddle.compat", "to_text"),
    ],
)
def test_a_module_that_scripts_import_has_its_name(
    paddle: ModuleType, module: str, name: str
) -> None:
    assert hasattr(import_module(module), name)


def test_paddle_compat_converts_as_it_did_under_python_3() -> None:
    assert text.to_text([b"a", "b"]) == ["a", "b"]
    assert text.to_bytes({"a"}) == {b"a"}
    assert text.to_text(7) == 7
    words = ["a", b"b"]
    assert text.to_bytes(words, inplace=True) is words
    assert words == [b"a", b"b"]
    halves = [text.round(x) for x in (0.5, 1.5, -0.5, -2.4)]  # Python 3's own: 0, 2, 0, -2
    assert halves == [1.0, 2.0, -1.0, -2.0]
    assert math.isclose(text.round(2.675, 2), 2.68)
    assert text.floor_division(-7, 2) == -4
    assert text.get_exception_message(ValueError("no")) == "no"


def test_get_places_says_what_replaced_it(paddle: ModuleType) -> None:
    with pytest.raises(ProgramError, match="parallel_do") as found:
        import_module("paddle.fluid.layers.device").get_places(2)
    assert "ParallelExecutor" in str(found.value.__notes__)
