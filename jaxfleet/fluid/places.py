"""Places: fluid's names of devices, and the JAX devices that they denote.

Fluid counts the CPU as `CPU_NUM` devices, and JAX must know their number before it starts. So they
are created at the first sign that a script will run a program, and the variable may be set any time
before that. A script that requests GPUs on a machine without any runs on the CPU, with a warning.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

from jaxfleet.env import ensure_cpu_num, read_cpu_num, read_selected_gpus
from jaxfleet.errors import AssertedError, StrategyError
from jaxfleet.runtime.devices import have_cpu_devices


@dataclass(frozen=True)
class CPUPlace:
    """The CPU."""

    def _equals(self, other: object) -> bool:
        return self == other

    def _type(self) -> int:
        return 0


@dataclass(frozen=True)
class CUDAPlace:
    """A GPU by its number."""

    id: int = 0

    def _equals(self, other: object) -> bool:
        return self == other

    def _type(self) -> int:
        return 1


Place: TypeAlias = CPUPlace | CUDAPlace


class AnyPlace:
    """Holds a place of either kind: `fluid.core.Place()`, which scripts query for its kind."""

    def __init__(self) -> None:
        self._place: Place | None = None

    def set_place(self, place: Place) -> None:
        self._place = place

    def is_cpu_place(self) -> bool:
        return isinstance(self._place, CPUPlace)

    def is_gpu_place(self) -> bool:
        return isinstance(self._place, CUDAPlace)

    def gpu_device_id(self) -> int:
        """Returns the number of the GPU; AssertionError if it is not a GPU."""
        return self._gpu().id

    def _gpu(self) -> CUDAPlace:
        if not isinstance(self._place, CUDAPlace):
            raise AssertedError("the place is no GPU", hint="ask is_gpu_place() first")
        return self._place

    def _equals(self, other: object) -> bool:
        return self._place == (other._place if isinstance(other, AnyPlace) else other)

    def _type(self) -> int:
        if self._place is None:
            raise AssertedError("the place was not set", hint="set_place(fluid.CPUPlace())")
        return self._place._type()


def cpu_places(device_count: int | None = None) -> list[CPUPlace]:
    """Returns places on the CPU.

    There are `CPU_NUM` unless given, which is set to 1 if not set, as in fluid.
    """
    count = device_count if device_count is not None else ensure_cpu_num()
    if count < 1:
        raise StrategyError(f"{count} places", hint="ask for at least one")
    return [CPUPlace()] * count


def cuda_places(device_ids: Sequence[int] | None = None) -> list[CUDAPlace]:
    """Returns places on GPUs: of given numbers, of `FLAGS_selected_gpus`, or all.

    Raises:
        StrategyError: there is no GPU, so the number of places is undefined.
    """
    given = device_ids if device_ids is not None else read_selected_gpus()
    if given is not None:
        return [CUDAPlace(number) for number in given]
    found = gpus()
    if not found:
        what = "cuda_places: JAX has no GPU here"
        raise StrategyError(what, hint="name their numbers, or use cpu_places()")
    return [CUDAPlace(number) for number in range(len(found))]


def gpus() -> Sequence[Any]:
    """Returns the GPUs of this machine."""
    prepare_devices()
    try:
        found: Sequence[Any] = jax.local_devices(backend="gpu")
    except RuntimeError:
        return ()
    return found


def prepare_devices(count: int | None = None) -> None:
    """Creates `CPU_NUM` CPU devices, if JAX has not started yet."""
    have_cpu_devices(max(count or 1, read_cpu_num() or 1))


def devices_of(places: Sequence[Place]) -> tuple[Any, ...]:
    """Returns the distinct devices that places denote.

    Raises AssertionError if places are of different kinds, and StrategyError if there are not
    enough devices.
    """
    kinds = {type(place) for place in places}
    if len(kinds) != 1 or not kinds <= {CPUPlace, CUDAPlace}:
        what = f"places are of the kinds {', '.join(sorted(kind.__name__ for kind in kinds))}"
        raise AssertedError(what, hint="all are CPUPlace(), or all are CUDAPlace(number)")
    numbers = [place.id for place in places if isinstance(place, CUDAPlace)]
    if numbers and (found := gpus()):
        return tuple(_gpu(found, number) for number in numbers)
    if numbers:
        warn_of_no_gpu(len(places))
    return _cpus(len(places))


def device_to_choose(place: Any) -> Any:
    """Returns the device to pass to JAX; None if it is JAX's default."""
    if isinstance(place, CUDAPlace):
        found = gpus()
        if not found:
            warn_of_no_gpu(1)
            return None
        return _gpu(found, place.id) if place.id else None
    is_elsewhere = isinstance(place, CPUPlace) and jax.default_backend() != "cpu"
    return jax.local_devices(backend="cpu")[0] if is_elsewhere else None


def default_places(*, use_cuda: bool) -> list[CPUPlace] | list[CUDAPlace]:
    """Returns the default places: GPUs if requested and available, or the CPU."""
    if use_cuda and gpus():
        return cuda_places()
    places = cpu_places()
    if use_cuda:
        warn_of_no_gpu(len(places))
    return places


def warn_of_no_gpu(count: int) -> None:
    """Warns that a request for GPUs runs on the CPU."""
    devices = f"{count} device{'s' * (count > 1)}"
    text = f"a GPU is asked for and JAX has none here: the CPU stands in, as {devices}"
    warnings.warn(text, stacklevel=4)


def _gpu(found: Sequence[Any], number: int) -> Any:
    if not 0 <= number < len(found):
        raise StrategyError(f"there is no GPU {number}: JAX has {len(found)}")
    return found[number]


def _cpus(count: int) -> tuple[Any, ...]:
    prepare_devices(count)
    found = jax.local_devices(backend="cpu")
    if len(found) < count:
        what = f"{count} places on the CPU, which JAX has started as {len(found)} devices"
        hint = f"set CPU_NUM={count} before the first Executor is made"
        raise StrategyError(what, hint=hint)
    return tuple(found[:count])
