"""Captured programs of the zoo, run on one device: bit by bit as their steps."""

import pytest

from tests.capture.common import assert_same_as_the_step
from tests.shared_zoo import built_zoo, captured_zoo
from tests.zoo import ZOO

RUN = (
    *("cnn_batchnorm", "scan_layers", "remat", "nnx", "mixed_precision", "schedule"),
    *("multisteps", "dropout", "embedding", "sorted_batch", "branch_on_loss"),
    *("while_loop", "row_gradients"),
)


@pytest.mark.grid
@pytest.mark.parametrize("name", RUN)
def test_an_entry_does_on_one_device_what_its_step_does(name: str) -> None:
    built = built_zoo(name)
    batch = built.batch(0, ZOO[name].rows)
    assert_same_as_the_step(built.train_step, built.state, batch, captured_zoo(name))
