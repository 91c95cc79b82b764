"""Profiles by JAX's own profiler, under fluid's names.

A profile is a folder of JAX traces, to be viewed with TensorBoard or Perfetto; no table is printed.
"""

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxfleet.fluid.argument_checks import mistake

_STATES = ("CPU", "GPU", "All")
_TRACERS = ("Default", "OpDetail", "AllOpDetail")
_KEYS = (None, "default", "calls", "total", "max", "min", "ave")


class _Running:
    """The folder of the running trace; None if there is none."""

    def __init__(self) -> None:
        self.folder: str | None = None


_RUNNING = _Running()


def start_profiler(state: str, tracer_option: str = "Default") -> None:
    """Starts a profile; does nothing if one is running.

    JAX traces all devices and operators, whatever `state` and `tracer_option` are.

    Raises:
        ValueError: there is no such state or option.
    """
    if state not in _STATES:
        raise mistake("The state must be 'CPU' or 'GPU' or 'All'", f"not {state!r}")
    if tracer_option not in _TRACERS:
        raise mistake(f"tracer option must be one of {', '.join(_TRACERS)}", f"not {tracer_option}")
    if _RUNNING.folder is None:
        folder = tempfile.mkdtemp(prefix="jaxfleet-profile-")
        jax.profiler.start_trace(folder)
        _RUNNING.folder = folder


def stop_profiler(sorted_key: str | None = None, profile_path: str = "/tmp/profile") -> None:  # noqa: S108  # fluid's default
    """Stops the profile and writes it; does nothing if none is running.

    Args:
        sorted_key: `calls`, `total`, `max`, `min` or `ave`: checked, but the viewer sorts.
        profile_path: the output folder, which replaces an earlier profile. Other contents are kept:
            the profile becomes a new folder inside it (or beside a file), which a warning names.

    Raises:
        ValueError: there is no such key.
    """
    _check_key(sorted_key)
    folder, _RUNNING.folder = _RUNNING.folder, None
    if folder is None:
        return
    jax.profiler.stop_trace()
    _place(Path(folder), Path(profile_path))


def _place(trace: Path, target: Path) -> None:
    """Moves a trace to `target`, replacing an earlier trace; otherwise beside or inside it."""
    if os.path.lexists(target) and not _is_trace(target):
        inside = target if target.is_dir() else target.parent
        new = Path(tempfile.mkdtemp(prefix=f"{target.name or 'profile'}-", dir=inside))
        warnings.warn(f"the profile is in {new}: {target} is not a profile", stacklevel=3)
        target = new
    if (target / "plugins").is_dir():
        shutil.rmtree(target / "plugins")
    target.mkdir(parents=True, exist_ok=True)
    for part in list(trace.iterdir()):
        shutil.move(part, target / part.name)
    trace.rmdir()


def _is_trace(folder: Path) -> bool:
    """Whether a folder is empty or contains only `plugins/profile/`."""
    for name in ("plugins", "profile"):
        if not folder.is_dir():
            return False
        names = {path.name for path in folder.iterdir()}
        if names != {name} or (folder / name).is_symlink():
            return not names
        folder /= name
    return folder.is_dir()


def reset_profiler() -> None:
    """Discards the profile so far, and continues."""
    if _RUNNING.folder is not None:
        jax.profiler.stop_trace()
        shutil.rmtree(_RUNNING.folder, ignore_errors=True)
        jax.profiler.start_trace(_RUNNING.folder)


@contextmanager
def profiler(
    state: str,
    sorted_key: str | None = None,
    profile_path: str = "/tmp/profile",  # noqa: S108
    tracer_option: str = "Default",
) -> Iterator[None]:
    """Profiles the body of a `with`; arguments as above."""
    _check_key(sorted_key)
    start_profiler(state, tracer_option)
    try:
        yield
    finally:
        stop_profiler(sorted_key, profile_path)


@contextmanager
def cuda_profiler(
    output_file: str, output_mode: str | None = None, config: Any = None
) -> Iterator[None]:
    """Profiles GPUs in the body of a `with`; JAX's trace becomes the folder `output_file`.

    Raises:
        ValueError: `output_mode` is neither `kvp` nor `csv`.
    """
    del config
    if output_mode not in {None, "kvp", "csv"}:
        raise mistake("The output mode must be 'kvp' or 'csv'", f"not {output_mode!r}")
    with profiler("GPU", None, output_file):
        yield


def _check_key(sorted_key: str | None) -> None:
    if sorted_key not in _KEYS:
        what = "The sorted_key must be None or in 'calls', 'total', 'max', 'min' and 'ave'"
        raise mistake(what, f"not {sorted_key!r}")
