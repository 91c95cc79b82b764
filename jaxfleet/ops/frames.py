"""Tells the user's lines from those of libraries."""

import functools
import importlib.util
import inspect
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from jaxfleet.ir import Source

_LIBRARIES = (
    *("jax", "jaxlib", "flax", "optax", "chex", "numpy", "jaxfleet"),
    *("diffrax", "equinox", "haiku", "lineax", "numpyro", "optimistix", "jaxtyping"),
)


@functools.lru_cache(maxsize=1 << 10)
def is_library(file: str) -> bool:
    """Tells whether a file belongs to a library or to Python, or was made by them."""
    if file.startswith(("<frozen", "<string")) or not file:
        return True
    if any(file.startswith(folder) for folder in _library_folders()):
        return True
    return file.startswith(_python_folder()) and "-packages" not in file


def line_of_caller() -> Source | None:
    """Returns the user's line that is running: the innermost frame outside libraries."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # inspect would read every file
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return Source(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)
        frame = frame.f_back
    return None


def warn_at_caller(text: str) -> None:
    """Warns, at the user's line."""
    where = line_of_caller()
    if where is None:
        warnings.warn(text, stacklevel=3)
    else:
        warnings.warn_explicit(text, UserWarning, where.file, where.line)


def line_of_error(error: BaseException) -> Source | None:
    """Returns the innermost of the user's lines that an exception went through."""
    found = None
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not is_library(code.co_filename):
            found = Source(code.co_filename, traceback.tb_lineno, code.co_qualname)
        traceback = traceback.tb_next
    return found


def line_of_function(function: Callable[..., Any]) -> Source | None:
    """Returns the line where a function is defined, or None for one that is not Python's."""
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = inspect.unwrap(inner)
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    if code is None:
        return None
    return Source(code.co_filename, code.co_firstlineno, code.co_qualname)


@functools.cache
def _library_folders() -> tuple[str, ...]:
    specs = [importlib.util.find_spec(name) for name in _LIBRARIES]
    folders = [folder for s in specs if s for folder in s.submodule_search_locations or ()]
    return tuple(f"{folder}{os.sep}" for folder in folders)


@functools.cache
def _python_folder() -> str:
    return f"{sysconfig.get_paths()['stdlib']}{os.sep}"
