"""What operators are marked with while a `with` lasts: a name scope, a device."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from jaxfleet.errors import AssertedError
from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.no_effect import warn_no_effect


@dataclass
class _NameScope:
    path: str = "/"
    used: Counter[str] = field(default_factory=Counter)

    def inner(self, prefix: str) -> "_NameScope":
        number = self.used[prefix]
        self.used[prefix] += 1
        return _NameScope(f"{self.path}{prefix}_{number}/" if number else f"{self.path}{prefix}/")


@dataclass
class _Current:
    scope: _NameScope = field(default_factory=_NameScope)
    device: str = ""


_CURRENT = _Current()


@contextmanager
def name_scope(prefix: str | None = None) -> Iterator[None]:
    """Marks the operators that are added within a `with`, as `op_namescope`.

    Scopes nest: `/encoder/`, `/encoder/attention/`. The same prefix in the same place again is
    `/encoder_1/`.

    Raises:
        AssertionError: the prefix is empty.
    """
    if not prefix:
        raise mistake("a name scope's prefix is empty", "give it a name", AssertedError)
    old = _CURRENT.scope
    _CURRENT.scope = old.inner(prefix)
    try:
        yield
    finally:
        _CURRENT.scope = old


def current_name_scope() -> str:
    """Returns the path of the scope that operators are added in: `/` outside all."""
    return _CURRENT.scope.path


@contextmanager
def device_guard(device: str | None = None) -> Iterator[None]:
    """Marks the operators that are added within a `with`, as `op_device`.

    XLA places a program as a whole, so the mark moves nothing; programs are told apart by it. A
    device with a number, which cuts a program into sections in fluid, is warned of.

    Args:
        device: `cpu`, `gpu` or `gpu:1`; empty or None for none.

    Raises:
        ValueError: it is none of these.
    """
    name, colon, number = (device or "").partition(":")
    if name not in {"", "cpu", "gpu"} or (colon and not (name == "gpu" and number.isdecimal())):
        raise mistake(f"{device!r} is no device", "it is cpu, gpu, gpu:1, ..., or None")
    if number:
        reason = "a program runs whole on each of its devices; shard a captured step to divide it"
        warn_no_effect(f"device_guard({device!r})", reason)
    old, _CURRENT.device = _CURRENT.device, device or ""
    try:
        yield
    finally:
        _CURRENT.device = old


def current_device() -> str:
    """Returns the device that operators are marked with, empty for none."""
    return _CURRENT.device
