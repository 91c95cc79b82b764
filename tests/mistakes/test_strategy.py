"""Mistakes with the strategy: its name, its devices, its passes."""

from typing import Any

import pytest

import jaxfleet as jf
from jaxfleet.errors import PassError, StrategyError
from tests.mistakes.common import batch, refused, training, wrapped


def distribute(strategy: Any) -> jf.Step:
    step, state = training(wrapped())
    found = jf.distribute(step, (state, batch()), strategy)
    assert isinstance(found, jf.Step)
    return found


@pytest.mark.parametrize(
    ("strategy", "cause", "hint"),
    [
        ("colective", "strategy: mode is 'colective'", "'collective'"),
        (4, "4 is not a strategy", "pass a DistributedStrategy"),
        (
            jf.DistributedStrategy,
            "DistributedStrategy'> is not a strategy",
            "pass a DistributedStrategy",
        ),
    ],
    ids=["a misspelt name", "a number", "the class"],
)
def test_what_is_no_strategy(strategy: Any, cause: str, hint: str) -> None:
    with refused(StrategyError, cause=cause, line="jf.distribute(", hint=hint):
        distribute(strategy)


def test_more_devices_than_there_are() -> None:
    with refused(
        StrategyError,
        cause="99 devices are asked for, and jax has 8",
        line="jf.distribute(",
        hint="jf.emulate_devices(99)",
    ):
        distribute(jf.DistributedStrategy(devices=99))


def test_one_device_and_several() -> None:
    with refused(
        StrategyError,
        cause="mode 'single' with 4 devices",
        line="jf.DistributedStrategy(mode=",
        hint="mode='collective'",
    ):
        jf.DistributedStrategy(mode="single", devices=4)


def test_a_lowering_that_there_is_not() -> None:
    with refused(
        StrategyError,
        cause="lowering is 'pjit'",
        line="jf.DistributedStrategy(lowering=",
        hint="'shard_map', 'pmap'",
    ):
        jf.DistributedStrategy(lowering="pjit")  # type: ignore[arg-type]  # the mistake


@pytest.mark.parametrize(
    ("passes", "cause", "hint"),
    [
        ("fuse_allreduces", "no pass 'fuse_allreduces'", "did you mean fuse_allreduce"),
        ("fuse_allreduce{size=4}", "fuse_allreduce: no option 'size'", "bucket_size_bytes"),
        ("fuse_allreduce{flat=true", "pipeline: expected ','", "pipelines read like"),
    ],
    ids=["a misspelt pass", "an option that there is not", "a brace left open"],
)
def test_a_pipeline_that_does_not_read(passes: str, cause: str, hint: str) -> None:
    with refused(PassError, cause=cause, line="jf.distribute(", hint=hint):
        distribute(jf.DistributedStrategy(devices=2, passes=passes))
