"""Registers only the toy passes, for tests that request them."""

import pytest

from jaxfleet.pipeline import register_pass, registry
from tests.pipeline.toys import TOY_PASSES


@pytest.fixture
def toy_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_PASSES", {})
    for name, cls in TOY_PASSES.items():
        register_pass(name)(cls)
