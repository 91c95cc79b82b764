"""Every program of the zoo is captured, rewritten, and trains on several devices as on one.

All tests are in one file, so that a worker captures each program once and trains it once on one
device.
"""

from itertools import cycle
from typing import Any

import jax
import numpy as np
import pytest
from jax import export
from jax.errors import InconclusiveDimensionOperation

from jaxfleet.analysis.step_checks import meaning_rules
from jaxfleet.ir import parse, print_program, verify
from jaxfleet.passes import GradAllreduce
from tests.runtime.comparing import ELSEWHERE, compare
from tests.shared_zoo import captured_zoo, one_device
from tests.tiers import by_default
from tests.zoo import TRAITS, ZOO, Case, having, lacking

STEPS = 5
CORE = [entry.name for entry in having("core")]
OTHERS = [entry.name for entry in lacking("core") if entry.name not in ELSEWHERE]
CAPTURED = [entry.name for entry in lacking("marker_inside")]


# By default: the core and one program per trait; the grid has all.
DEFAULT = {*CORE, *(having(trait)[0].name for trait in TRAITS)}


def every_entry() -> list[Any]:
    return [pytest.param(entry, id=name) for name, entry in ZOO.items()]


@pytest.mark.parametrize("name", by_default(ZOO, *DEFAULT))
def test_a_batch_depends_on_its_step_and_size_only(name: str) -> None:
    batch, rows = one_device(name).built.batch, ZOO[name].rows
    for first, again in zip(
        jax.tree.leaves(batch(1, rows)), jax.tree.leaves(batch(1, rows)), strict=True
    ):
        assert first.shape[0] == rows
        np.testing.assert_array_equal(first, again)


@pytest.mark.grid  # by default on captures: test_a_captured_entry_keeps_its_letter...
@pytest.mark.parametrize("entry", every_entry())
def test_an_entry_traces_with_a_letter_unless_it_says_otherwise(entry: Case) -> None:
    built = one_device(entry.name).built
    (rows,) = export.symbolic_shape("b")

    def lettered(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)

    batch = jax.tree.map(lettered, built.batch(0, entry.rows))
    if "no_symbolic" not in entry.traits:
        jax.eval_shape(built.train_step, built.state, batch)
        return
    with pytest.raises((InconclusiveDimensionOperation, TypeError)):
        jax.eval_shape(built.train_step, built.state, batch)


@pytest.mark.few(10)
@pytest.mark.parametrize("name", by_default(CAPTURED, *DEFAULT))
def test_a_captured_entry_is_valid_and_reads_back_as_it_was(name: str) -> None:
    program = captured_zoo(name).program
    verify(program)
    assert parse(print_program(program)) == program
    assert parse(print_program(program, source=True)) == program


@pytest.mark.few(5)
@pytest.mark.parametrize("name", by_default(CAPTURED, *DEFAULT))
def test_a_captured_entry_keeps_its_letter_unless_it_says_otherwise(name: str) -> None:
    captured = captured_zoo(name)
    by_size = not ZOO[name].traits.isdisjoint({"no_symbolic", "size_branch"})
    assert (captured.rows is not None) == by_size
    assert bool(captured.notes) == by_size


@pytest.mark.few(10)
@pytest.mark.parametrize("name", by_default(CAPTURED, *DEFAULT))
def test_the_verifier_accepts_an_entry_rewritten_for_four_devices(name: str) -> None:
    rewritten = GradAllreduce(devices=4).run(captured_zoo(name).program)
    verify(rewritten, more_rules=meaning_rules)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CORE)
def test_one_device_is_bitwise_the_plain_function(name: str) -> None:
    compare(name, 1, STEPS)


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "devices"), [*zip(CORE, cycle([2, 8]), strict=False)])
def test_devices_compute_what_one_does(name: str, devices: int) -> None:
    compare(name, devices, STEPS)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", by_default(OTHERS, *DEFAULT))
def test_the_one_device_meaning_holds_on_four_devices(name: str) -> None:
    compare(name, 4, STEPS)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_entry_that_is_compared_elsewhere_trains_on_one_device(name: str) -> None:
    assert len(one_device(name).results(STEPS)) == STEPS


def test_every_trait_has_an_entry_and_the_core_has_twelve() -> None:
    assert all(having(trait) for trait in TRAITS)
    assert len(having("core")) == 12
