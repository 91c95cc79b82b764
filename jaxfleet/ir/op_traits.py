"""Traits of operator types: what no pass may remove, repeat or reorder.

They are apart from the meanings in `jaxfleet.ops`, so that passes run on a text without JAX.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

JAX_PREFIX = "jax."  # of the operators that are jax's primitives


@dataclass(frozen=True)
class OpTraits:
    """Traits of one operator type.

    Attributes:
        has_effect: it has effects besides its outputs, so it is never dead.
        is_collective: all devices must run it together, so none may skip or reorder it.
    """

    has_effect: bool = False
    is_collective: bool = False


PURE = OpTraits()
EFFECT = OpTraits(has_effect=True)
COLLECTIVE = OpTraits(is_collective=True)

# Run by the runtime of trainers and servers, not on a device.
HOST_OPS = (
    "listen_and_serv",
    "fl_listen_and_serv",
    "send",
    "send_rows",
    "recv",
    "send_barrier",
    "fetch_barrier",
    "exchange",
    "distributed_lookup_table",
    "checkpoint_notify",
    "lookup_sparse_table",
    "merge_ids",
    "prefetch",
    "recv_save",
    "save",
    "split_ids",
    "split_selected_rows",
)

_TRAITS: Mapping[str, OpTraits] = MappingProxyType(
    {
        **dict.fromkeys(["assign", "raise_if", "exported"], PURE),
        **dict.fromkeys(["sum", "scale", "split_byref", "concat"], PURE),
        **dict.fromkeys(["c_split", "c_summand", "c_complete", "c_local"], PURE),
        **dict.fromkeys(["c_sync_calc_stream", "c_sync_comm_stream"], PURE),
        **dict.fromkeys(["c_iota", "c_random_bits", "c_random_split"], PURE),
        **dict.fromkeys(["table_lookup", "lookup_rows", "lookup_rows_grad"], PURE),
        **dict.fromkeys(["take_rows", "put_rows"], PURE),
        **dict.fromkeys(["fetch", "cut", "delete_var", "to_host", "to_device"], EFFECT),
        **dict.fromkeys(["c_gen_nccl_id", "c_comm_init", "c_comm_init_all", "gen_nccl_id"], EFFECT),
        **dict.fromkeys(HOST_OPS, EFFECT),
        # Differentiating a look-up trains its table, even if nothing reads the handle's gradient.
        "table_lookup_grad": EFFECT,
        **dict.fromkeys(["c_allreduce_sum", "c_allreduce_avg", "c_allreduce_prod"], COLLECTIVE),
        **dict.fromkeys(["c_allreduce_max", "c_allreduce_min"], COLLECTIVE),
        **dict.fromkeys(["c_allreduce_and", "c_allreduce_or", "c_allreduce_xor"], COLLECTIVE),
        **dict.fromkeys(["c_allgather", "c_reducescatter", "c_broadcast"], COLLECTIVE),
        "c_alltoall": COLLECTIVE,
    }
)
IR_OPS = frozenset(_TRAITS)


def ir_traits(op_type: str) -> OpTraits | None:
    """Returns the traits of an operator of the IR or of JAX; None for fluid's and users' types."""
    return PURE if op_type.startswith(JAX_PREFIX) else _TRAITS.get(op_type)
