"""Variables of fluid's flags and devices, and related ones of jax and CUDA."""

import os

from jaxfleet.env.variables import GPUS, PLATFORMS, XLA_FLAGS, get, read_number, refuse, whole

_RPC_DEADLINE = "FLAGS_rpc_deadline"
_CHECK_NAN_INF = "FLAGS_check_nan_inf"
_DEADLINE_MS = 180_000
_CPU_NUM = "CPU_NUM"
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def rpc_threads(what: str) -> int:
    """Returns `FLAGS_rpc_<what>_thread_num`: fluid's number of threads; 12 by default."""
    name = f"FLAGS_rpc_{what}_thread_num"
    return read_number(name, least=0, hint="fluid's default is 12") if get(name) else 12


def preset_flag(name: str) -> str | None:
    """Returns the value of one of fluid's flags in the environment, `FLAGS_<name>`."""
    return get(f"FLAGS_{name}") or None


def read_rpc_deadline_ms() -> int:
    """Returns `FLAGS_rpc_deadline`: how long fluid's programs wait for peers, in milliseconds."""
    text = get(_RPC_DEADLINE)
    found = whole(text) if text else _DEADLINE_MS
    if not found:
        refuse(_RPC_DEADLINE, f"is {text!r}, not a time", "it is milliseconds, such as 180000")
    return found


def read_check_nan_inf() -> bool:
    """Returns `FLAGS_check_nan_inf`: whether NaN or Inf in a run is an error."""
    text = get(_CHECK_NAN_INF).lower() or "0"
    if text not in {"0", "1", "false", "true"}:
        refuse(_CHECK_NAN_INF, f"is {text!r}, neither 0 nor 1", "set it to 1 to check runs")
    return text in {"1", "true"}


def read_cpu_num() -> int | None:
    """Returns the number of devices that the CPU counts as in fluid scripts (`CPU_NUM`), if set."""
    hint = "it is how many devices the CPU stands in for"
    return read_number(_CPU_NUM, least=1, hint=hint) if get(_CPU_NUM) else None


def ensure_cpu_num() -> int:
    """Returns `CPU_NUM`; sets it to 1 if it is not set, as fluid does."""
    os.environ.setdefault(_CPU_NUM, "1")
    return read_cpu_num() or 1


def read_selected_gpus() -> tuple[int, ...] | None:
    """Returns the numbers of the GPUs to use (`FLAGS_selected_gpus`), None for all."""
    words = [word.strip() for word in get(GPUS).split(",") if word.strip()]
    numbers = [whole(word) for word in words]
    for word, number in zip(words, numbers, strict=True):
        if number is None:
            refuse(GPUS, f"has {word!r}, which is not a number", "write 0,1")
    return tuple(number for number in numbers if number is not None) or None


def says_how_many_cpu_devices() -> bool:
    """Whether `XLA_FLAGS` fixes the number of CPU devices."""
    return "xla_force_host_platform_device_count" in get(XLA_FLAGS)


def read_visible_gpus() -> tuple[str, ...] | None:
    """Returns the entries of `CUDA_VISIBLE_DEVICES`; None if it is not set, so all are visible."""
    if _VISIBLE_GPUS not in os.environ:
        return None
    return tuple(word.strip() for word in get(_VISIBLE_GPUS).split(",") if word.strip())


def wants_gpus() -> bool:
    """Whether `JAX_PLATFORMS` lets jax use GPUs."""
    wanted = get(PLATFORMS).lower().split(",")
    return wanted == [""] or not {"cuda", "gpu"}.isdisjoint(wanted)
