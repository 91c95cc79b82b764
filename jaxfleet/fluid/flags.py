"""Flags: what scripts tell the original's runtime. They are kept and given back.

`FLAGS_rpc_deadline` says how long trainers and servers wait for each other. No other acts here:
what they steer (memory pools, choices of kernels, threads of the transport) XLA and our transport
decide by themselves.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jaxfleet.env import read_rpc_deadline_ms
from jaxfleet.fluid.checks import check_type, mistake

_FLAGS: dict[str, Any] = {
    "FLAGS_allocator_strategy": "auto_growth",
    "FLAGS_benchmark": False,
    "FLAGS_check_nan_inf": False,
    "FLAGS_cudnn_deterministic": False,
    "FLAGS_cudnn_exhaustive_search": False,
    "FLAGS_eager_delete_tensor_gb": 0.0,
    "FLAGS_enable_parallel_graph": False,
    "FLAGS_fraction_of_gpu_memory_to_use": 0.92,
    "FLAGS_rpc_deadline": read_rpc_deadline_ms(),
    "FLAGS_rpc_retry_times": 3,
    "FLAGS_sync_nccl_allreduce": True,
}


def set_flags(flags: Mapping[str, Any]) -> None:
    """Keeps flags; one that nobody knows is kept with a warning.

    Raises:
        TypeError: it is no dict.
    """
    check_type(flags, "what set_flags takes", Mapping, "{'FLAGS_rpc_deadline': 5000}")
    for name, value in flags.items():
        if name not in _FLAGS:
            warnings.warn(f"there is no flag {name}; it is kept, and does nothing", stacklevel=2)
        _FLAGS[name] = value


def get_flags(flags: Sequence[str] | str) -> dict[str, Any]:
    """Returns flags by their names.

    Raises:
        TypeError: it is neither a name nor a list of them.
        ValueError: nobody knows one.
    """
    check_type(flags, "what get_flags takes", (str, list, tuple))
    names = [flags] if isinstance(flags, str) else flags
    for name in names:
        if name not in _FLAGS:
            raise mistake(f"there is no flag {name}", f"flags: {', '.join(_FLAGS)}")
    return {name: _FLAGS[name] for name in names}
