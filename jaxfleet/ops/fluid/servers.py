"""Operators that only parameter servers run, and those that tell trainers what servers hold."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxfleet.ops.fluid.arrays import device_dtype
from jaxfleet.ops.fluid.schema import Schema, Value, describe, fluid_op, slots

describe(
    Schema(
        "checkpoint_notify",
        (),
        (),
        {"epmap": [], "dir": "", "lookup_table": "", "trainer_id": 0},
    )
)
describe(Schema("merge_ids", slots("Ids* Rows* X*"), slots("Out*")))
describe(
    Schema(
        "recv_save",
        (),
        (),
        {
            "dtype": "float32",
            "endpoints": [],
            "file_path": "",
            "is_sparse": False,
            "overwrite": True,
            "pserver_num": 0,
            "remote_varnames": [],
            "save_as_fp16": False,
            "shape": [],
            "slice_shapes": [],
            "slice_varnames": [],
            "trainer_id": 0,
        },
    )
)


describe(Schema("split_ids", slots("Ids*"), slots("Out*")))


@fluid_op("ref_by_trainer_id", inputs="X* TrainerId")
def ref_by_trainer_id(_: Mapping[str, Any], x: Value, trainer: Value) -> Value:
    """Returns the input of the trainer whose number is given."""
    return jnp.stack(x)[jnp.asarray(trainer).reshape(())]


@fluid_op("fake_init", attrs={"shape": [], "dtype": "float32"})
def fake_init(attrs: Mapping[str, Any]) -> Value:
    """Returns nothing of a table that servers hold: an array without rows."""
    return jnp.zeros((0, *attrs["shape"][1:]), device_dtype(attrs["dtype"]))
