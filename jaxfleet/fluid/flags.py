"""Flags of the original's runtime; `docs/fluid-arguments.md` lists those that act here.

`FLAGS_rpc_deadline` is the timeout of trainers and servers for each other, and
`FLAGS_check_nan_inf` makes a run that computes NaN or Inf an error. The others control memory pools
and choices of kernels, which XLA decides by itself, or have no effect and warn once.
"""

import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from jaxfleet.env import read_check_nan_inf, read_rpc_deadline_ms
from jaxfleet.fluid.argument_checks import check_type, mistake, warn_no_effect

_FLAGS: dict[str, Any] = {
    "FLAGS_allocator_strategy": "auto_growth",
    "FLAGS_benchmark": False,
    "FLAGS_check_nan_inf": read_check_nan_inf(),
    "FLAGS_cudnn_deterministic": False,
    "FLAGS_cudnn_exhaustive_search": False,
    "FLAGS_eager_delete_tensor_gb": 0.0,
    "FLAGS_enable_parallel_graph": False,
    "FLAGS_fraction_of_gpu_memory_to_use": 0.92,
    "FLAGS_rpc_deadline": read_rpc_deadline_ms(),
    "FLAGS_rpc_retry_times": 3,
    "FLAGS_sync_nccl_allreduce": True,
}

_REASONS: Mapping[str, str] = {
    "FLAGS_benchmark": "runs are not timed by it; jf.trace and jaxfleet top show what takes time",
    "FLAGS_cudnn_deterministic": "set XLA_FLAGS=--xla_gpu_deterministic_ops=true before jax starts",
    "FLAGS_rpc_retry_times": "what is lost is sent again until FLAGS_rpc_deadline has passed",
}
HINTS = frozenset(_FLAGS) - {"FLAGS_check_nan_inf", "FLAGS_rpc_deadline", *_REASONS}


def flag(name: str) -> Any:
    """Returns one flag."""
    return _FLAGS[name]


def set_flags(flags: Mapping[str, Any]) -> None:
    """Sets flags; unknown ones are stored with a warning.

    Raises:
        TypeError: the argument is not a dict.
    """
    check_type(flags, "what set_flags takes", Mapping, "{'FLAGS_rpc_deadline': 5000}")
    for name, value in flags.items():
        if name not in _FLAGS:
            warnings.warn(f"there is no flag {name}; it is kept, and does nothing", stacklevel=2)
        if name in _REASONS and value != _FLAGS[name]:
            warn_no_effect(name, _REASONS[name])
        _FLAGS[name] = value


def get_flags(flags: Sequence[str] | str) -> dict[str, Any]:
    """Returns flags by their names.

    Raises:
        TypeError: it is neither a name nor a list of names.
        ValueError: a flag is unknown.
    """
    check_type(flags, "what get_flags takes", (str, list, tuple))
    names = [flags] if isinstance(flags, str) else flags
    for name in names:
        if name not in _FLAGS:
            raise mistake(f"there is no flag {name}", f"flags: {', '.join(_FLAGS)}")
    return {name: _FLAGS[name] for name in names}


class Globals(MutableMapping[str, Any]):
    """The flags as one mapping: `fluid.core.globals()["FLAGS_rpc_deadline"] = 5000`."""

    def __getitem__(self, name: str) -> Any:
        return _FLAGS[name]

    def __setitem__(self, name: str, value: Any) -> None:
        set_flags({name: value})

    def __delitem__(self, name: str) -> None:
        raise mistake(f"flag {name} cannot be taken away", "set another value")

    def __iter__(self) -> Iterator[str]:
        return iter(_FLAGS)

    def __len__(self) -> int:
        return len(_FLAGS)
