"""Schemas of operators between ranks, and operators of parameter servers and of row gradients.

Row gradients (`SELECTED_ROWS`) are dense arrays on a device here, so the operators that merge
duplicate rows, or convert them to an array, return their input.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxfleet.ops.fluid.arrays import device_dtype
from jaxfleet.ops.fluid.schema import Value, describe, fluid_op
from jaxfleet.ops.registry import Array

_ON_RING: Mapping[str, Any] = {"ring_id": 0, "use_calc_stream": False}


for _name in ("sum", "max", "min", "prod"):
    describe(f"c_allreduce_{_name}", inputs="X", attrs=_ON_RING)
describe("c_broadcast", inputs="X", attrs={**_ON_RING, "root": 0})
describe("c_allgather", inputs="X", attrs={**_ON_RING, "nranks": 1})
describe("c_reducescatter", inputs="X", attrs={**_ON_RING, "nranks": 1})
describe("c_sync_calc_stream", inputs="X")
describe("c_sync_comm_stream", inputs="X*", outputs="Out*", attrs={"ring_id": 0})
describe("c_gen_nccl_id", attrs={"rank": 0, "endpoint": "", "other_endpoints": []})
describe("c_comm_init", inputs="X", outputs="", attrs={"nranks": 1, "rank": 0, "ring_id": 0})
describe("c_comm_init_all", outputs="", attrs={"ring_id": 0})
describe("gen_nccl_id", outputs="NCCLID",
         attrs={"trainers": [], "trainer_id": 0, "nccl_comm_num": 1,
                "use_hierarchical_allreduce": False,
                "hierarchical_allreduce_inter_nranks": 0})  # fmt: skip
describe("checkpoint_notify", outputs="",
         attrs={"epmap": [], "dir": "", "lookup_table": "", "trainer_id": 0})  # fmt: skip
describe("recv_save", outputs="",
         attrs={"dtype": "float32", "endpoints": [], "file_path": "", "is_sparse": False,
                "overwrite": True, "pserver_num": 0, "remote_varnames": [], "save_as_fp16": False,
                "shape": [], "slice_shapes": [], "slice_varnames": [],
                "trainer_id": 0})  # fmt: skip
describe("merge_ids", inputs="Ids* Rows* X*", outputs="Out*")
describe("split_ids", inputs="Ids*", outputs="Out*")


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
