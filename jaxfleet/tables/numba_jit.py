"""Numba functions compiled at first call and cached in the user's cache folder.

Importing numba takes a quarter of a second and compiling a function up to one, so both are deferred
to the first use; later processes load the compiled code.
"""

import hashlib
import warnings
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from threading import RLock
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

from jaxfleet.env import is_private, read_cache_dir

P = ParamSpec("P")
R = TypeVar("R")

_LOCK = RLock()  # numba compiles in one thread at a time; so do we, as we set its cache folder


def compiled(*types: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Compiles a function for exactly these argument types.

    It runs without the GIL. Arithmetic is IEEE's, operation by operation, without contraction or
    reordering, so results are the same to the bit on every machine.

    Args:
        *types: of each argument: `i64`, `f32`, ... for numbers; `i64[]` for a contiguous array
            that is only read, `f32[,]` for one of two axes, `i64[]!` for one that is written.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @cache
        def ready() -> Callable[P, R]:
            with _LOCK:
                return _compile(function, types)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return ready()(*args, **kwargs)

        return call

    return decorate


class Inlined:
    """A function that only compiled functions call; `make` returns the numba function for it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.made = cache(make)

    def __call__(self, *_: Any) -> Any:
        raise NotImplementedError("only compiled functions call this")


def inlined(function: Callable[..., Any]) -> Inlined:
    """Marks a function for inlining into compiled functions."""

    def make() -> Any:
        import numba

        return numba.njit(inline="never", error_model="numpy")(_with_inlined(function))

    return Inlined(make)


def _address_to_pointer(of: str) -> Callable[[], Any]:
    def make() -> Any:
        from numba import types
        from numba.extending import intrinsic

        def pointer(_typing: Any, _address: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

            return types.CPointer(getattr(types, of))(types.uint64), generate

        return intrinsic(pointer)

    return make


floats_at = Inlined(_address_to_pointer("float32"))
words_at = Inlined(_address_to_pointer("int32"))


def _compile(function: Callable[..., Any], types: tuple[str, ...]) -> Any:
    import numba

    where, before = _cache_dir(), numba.config.CACHE_DIR
    source = _with_inlined(function)
    # numba reads the cache folder as it wraps a function; then the user's setting is restored.
    numba.config.CACHE_DIR = str(where or "")
    try:
        found = numba.njit(nogil=True, error_model="numpy", cache=where is not None)(source)
    finally:
        numba.config.CACHE_DIR = before
    found.compile(tuple(_type(text) for text in types))
    found.disable_compile()
    return found


def _with_inlined(function: Callable[..., Any]) -> Any:
    """Returns the function with each `Inlined` that it names replaced by numba's own."""
    assert isinstance(function, FunctionType)
    names = {
        name: value.made() if isinstance(value, Inlined) else value
        for name, value in function.__globals__.items()
        if name in function.__code__.co_names
    }
    kept = {"__name__": function.__module__, "__builtins__": __builtins__}
    copy = FunctionType(function.__code__, kept | names, function.__name__)
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return copy


def _type(text: str) -> Any:
    from numba import types

    written, text = text.endswith("!"), text.removesuffix("!")
    name, bracket, axes = text.partition("[")
    names = {"i32": types.int32, "i64": types.int64, "u8": types.uint8, "u64": types.uint64}
    names |= {"f32": types.float32, "f64": types.float64, "b1": types.boolean}
    if not bracket:
        return names[name]
    return types.Array(names[name], axes.count(",") + 1, "C", readonly=not written)


@cache
def _cache_dir() -> Path | None:
    """Returns the folder of the cache, or None if there is no safe one.

    A folder that another user may write to is unsafe: a process executes the files it finds there.
    Its name contains a hash of the sources: numba checks only the file of a compiled function, and
    would miss a change in a function of another file that it calls.
    """
    root = read_cache_dir()
    if root is None:
        return None
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    folder = root / f"tables-{digest.hexdigest()[:16]}"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    if not is_private(folder):
        what = f"compiled functions are not kept in {folder}: another user may change what is there"
        warnings.warn(f"{what}; set JAXFLEET_CACHE_DIR to a folder of your own", stacklevel=2)
        return None
    return folder
