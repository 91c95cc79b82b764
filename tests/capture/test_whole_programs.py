"""Every program of the zoo is captured, printed and parsed; some are run, bit by bit."""

from typing import Any

import pytest

import jaxfleet as jf
from jaxfleet.ir import parse, print_program, verify
from tests.capture.common import assert_same_as_the_step, captured_zoo
from tests.zoo import ZOO, lacking

RUN = (
    *("cnn_batchnorm", "scan_layers", "remat", "nnx", "mixed_precision", "schedule"),
    *("multisteps", "dropout", "embedding", "sorted_batch", "branch_on_loss"),
    *("while_loop", "row_gradients"),
)


@pytest.mark.parametrize("name", [entry.name for entry in lacking("marker_inside")])
def test_an_entry_is_valid_and_reads_back_as_it_was(name: str) -> None:
    program = captured_zoo(name).program
    verify(program)
    assert parse(print_program(program)) == program
    assert parse(print_program(program, source=True)) == program


@pytest.mark.parametrize("name", RUN)
def test_an_entry_does_on_one_device_what_its_step_does(name: str) -> None:
    built: Any = ZOO[name].build(jf.distributed_optimizer)
    assert_same_as_the_step(built.train_step, built.state, built.batch(0, ZOO[name].rows))
