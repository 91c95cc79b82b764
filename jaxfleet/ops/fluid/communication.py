"""Schemas of operators between ranks, and operators of parameter servers and of row gradients.

Row gradients (`SELECTED_ROWS`) are dense arrays on a device here, so the operators that merge
duplicate rows, or convert them to an array, return their input.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxfleet.ops.fluid.arrays import device_dtype
from jaxfleet.ops.fluid.schema import Schema, Value, describe, fluid_op, slots
from jaxfleet.ops.registry import Array

_ON_RING: Mapping[str, Any] = {"ring_id": 0, "use_calc_stream": False}


def _described(op_type: str, inputs: str, outputs: str, attrs: Mapping[str, Any]) -> None:
    describe(Schema(op_type, slots(inputs), slots(outputs), attrs))


for _name in ("sum", "max", "min", "prod"):
    _described(f"c_allreduce_{_name}", "X", "Out", _ON_RING)
_described("c_broadcast", "X", "Out", {**_ON_RING, "root": 0})
_described("c_allgather", "X", "Out", {**_ON_RING, "nranks": 1})
_described("c_reducescatter", "X", "Out", {**_ON_RING, "nranks": 1})
_described("c_sync_calc_stream", "X", "Out", {})
_described("c_sync_comm_stream", "X*", "Out*", {"ring_id": 0})
_described("c_gen_nccl_id", "", "Out", {"rank": 0, "endpoint": "", "other_endpoints": []})
_described("c_comm_init", "X", "", {"nranks": 1, "rank": 0, "ring_id": 0})
_described("c_comm_init_all", "", "", {"ring_id": 0})
_described(
    "gen_nccl_id",
    "",
    "NCCLID",
    {
        "trainers": [],
        "trainer_id": 0,
        "nccl_comm_num": 1,
        "use_hierarchical_allreduce": False,
        "hierarchical_allreduce_inter_nranks": 0,
    },
)

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
    """Selects the input of a trainer by its number."""
    return jnp.stack(x)[jnp.asarray(trainer).reshape(())]


@fluid_op("fake_init", attrs={"shape": [], "dtype": "float32"})
def fake_init(attrs: Mapping[str, Any]) -> Value:
    """Placeholder of a table that servers hold: an array without rows."""
    return jnp.zeros((0, *attrs["shape"][1:]), device_dtype(attrs["dtype"]))


@fluid_op("merge_selected_rows", inputs="X")
def merge_selected_rows(attrs: Mapping[str, Any], x: Array) -> Array:
    """Sums duplicate rows, which a dense array does not have."""
    del attrs
    return x


@fluid_op("get_tensor_from_selected_rows", inputs="X")
def get_tensor_from_selected_rows(attrs: Mapping[str, Any], x: Array) -> Array:
    """Converts rows to an array, which they already are."""
    del attrs
    return x
