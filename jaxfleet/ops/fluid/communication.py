"""What fluid's operators between ranks look like; `jaxfleet.ops.collective` says what they do."""

from collections.abc import Mapping
from typing import Any

from jaxfleet.ops.fluid.schema import Schema, describe, slots

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
