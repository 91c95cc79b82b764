"""Choice of a step's devices, and emulated devices for machines with only one."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax

from jaxfleet.env import says_how_many_cpu_devices
from jaxfleet.errors import StrategyError


def emulate_devices(count: int) -> None:
    """Emulates several CPU devices, for trying a distributed step on one machine.

    Call it before any jax computation: the number of devices is fixed when jax first starts.

    Raises:
        StrategyError: jax has started with fewer devices of this process.

    Examples:
        >>> import jax
        >>> import jaxfleet as jf
        >>> jf.emulate_devices(2)
        >>> jax.local_device_count() >= 2
        True
    """
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        here = len(jax.local_devices(backend="cpu"))  # a group's other ranks have theirs
        if here >= count:
            return
        what = f"{count} devices cannot be emulated: jax has started with {here}"
        hint = "call emulate_devices before the first array is made"
        if jax.process_count() > 1:
            hint = f"start the ranks by jaxfleet launch --devices-per-process {count}"
        raise StrategyError(what, hint=hint) from error


def have_cpu_devices(count: int) -> None:
    """Emulates at least `count` CPU devices, unless JAX has started or a number is configured."""
    if count <= emulated_count() or says_how_many_cpu_devices():
        return
    with contextlib.suppress(RuntimeError):  # JAX has started
        jax.config.update("jax_num_cpu_devices", count)


def emulated_count() -> int:
    """Returns the configured number of emulated CPU devices, or 1."""
    told: int = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined, unused-ignore]  # jax 0.10 makes it up
    return max(1, told)


def choose_devices(count: int | None) -> Sequence[Any]:
    """Returns the first `count` devices, or all.

    Raises:
        StrategyError: there are fewer.
    """
    devices: list[Any] = jax.local_devices()  # those of other processes cannot be fed from here
    if count is None:
        return devices
    if count > len(devices):
        what = f"strategy: {count} devices are asked for, and jax has {len(devices)}"
        hint = f"on a CPU, call jf.emulate_devices({count}) before jax starts"
        raise StrategyError(what, hint=hint)
    return devices[:count]


def steps_must_not_overlap(devices: Sequence[Any]) -> bool:
    """Whether a step must end before the next may start.

    On XLA:CPU, all-reduces of several steps in flight wait for each other's threads, and with few
    cores never end (seen: 4 emulated devices on 2 cores).
    """
    return len(devices) > 1 and devices[0].platform == "cpu"
