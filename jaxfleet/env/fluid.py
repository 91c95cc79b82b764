"""The variables of fluid's flags and devices, and those of jax and CUDA beside them."""

import os

from jaxfleet.env.names import GPUS, PLATFORMS, XLA_FLAGS
from jaxfleet.env.reading import get, read_number, refuse, whole
from jaxfleet.errors import StrategyError

_RPC_DEADLINE = "FLAGS_rpc_deadline"
_CHECK_NAN_INF = "FLAGS_check_nan_inf"
_DEADLINE_MS = 180_000
_CPU_NUM = "CPU_NUM"
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def rpc_threads(what: str) -> int:
    """Returns `FLAGS_rpc_<what>_thread_num`: how many threads fluid would use; 12 unless set.

    Raises:
        StrategyError: it is no number.
    """
    name = f"FLAGS_rpc_{what}_thread_num"
    value = os.environ.get(name, "12")
    if not value.isdecimal():
        raise StrategyError(f"{name} is '{value}', and must be a number")
    return int(value)


def preset_flag(name: str) -> str | None:
    """Returns what the environment says of one of fluid's flags, as `FLAGS_<name>`."""
    return get(f"FLAGS_{name}") or None


def read_rpc_deadline_ms() -> int:
    """Returns `FLAGS_rpc_deadline`: how long fluid's programs wait for peers, in milliseconds.

    Raises:
        StrategyError: it is not a positive whole number.
    """
    text = get(_RPC_DEADLINE)
    found = whole(text) if text else _DEADLINE_MS
    if not found:
        refuse(_RPC_DEADLINE, f"is {text!r}, not a time", "it is milliseconds, such as 180000")
    return found


def read_check_nan_inf() -> bool:
    """Returns `FLAGS_check_nan_inf`: whether a run that computes NaN or Inf is an error.

    Raises:
        StrategyError: it is neither of 0, 1, true and false.
    """
    text = get(_CHECK_NAN_INF).lower() or "0"
    if text not in {"0", "1", "false", "true"}:
        refuse(_CHECK_NAN_INF, f"is {text!r}, neither 0 nor 1", "set it to 1 to check runs")
    return text in {"1", "true"}


def read_cpu_num() -> int | None:
    """Returns how many devices fluid scripts take the CPU for (`CPU_NUM`), None if unset.

    Raises:
        StrategyError: it is not a number from 1 on.
    """
    hint = "it is how many devices the CPU stands in for"
    return read_number(_CPU_NUM, least=1, hint=hint) if get(_CPU_NUM) else None


def ensure_cpu_num() -> int:
    """Returns `CPU_NUM`, and sets it to 1 where it is not set, as fluid does.

    Raises:
        StrategyError: it is not a number from 1 on.
    """
    os.environ.setdefault(_CPU_NUM, "1")
    return read_cpu_num() or 1


def read_selected_gpus() -> tuple[int, ...] | None:
    """Returns the numbers of the GPUs to use (`FLAGS_selected_gpus`), None for all.

    Raises:
        StrategyError: one of them is no number.
    """
    words = [word.strip() for word in get(GPUS).split(",") if word.strip()]
    numbers = [whole(word) for word in words]
    for word, number in zip(words, numbers, strict=True):
        if number is None:
            refuse(GPUS, f"has {word!r}, which is no number", "write 0,1")
    return tuple(number for number in numbers if number is not None) or None


def says_how_many_cpu_devices() -> bool:
    """Tells whether `XLA_FLAGS` fixes the number of CPU devices."""
    return "xla_force_host_platform_device_count" in get(XLA_FLAGS)


def read_visible_gpus() -> tuple[str, ...] | None:
    """Returns what `CUDA_VISIBLE_DEVICES` names; None where it is not set, so all are seen."""
    if _VISIBLE_GPUS not in os.environ:
        return None
    return tuple(word.strip() for word in get(_VISIBLE_GPUS).split(",") if word.strip())


def wants_gpus() -> bool:
    """Tells whether jax may take GPUs, by `JAX_PLATFORMS`."""
    wanted = get(PLATFORMS).lower().split(",")
    return wanted == [""] or not {"cuda", "gpu"}.isdisjoint(wanted)
