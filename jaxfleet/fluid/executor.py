"""Executor: runs fluid programs, feeding and fetching by name."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from jaxfleet.errors import ClosedError, FeedError
from jaxfleet.fluid.drawing import RUN, with_draws
from jaxfleet.fluid.program import Program, default_main_program
from jaxfleet.fluid.to_ir import ir_program
from jaxfleet.fluid.variable import Variable
from jaxfleet.ir import Program as IrProgram
from jaxfleet.ops.fluid.arrays import ON_DEVICE
from jaxfleet.runtime.executor import Executor as ProgramExecutor
from jaxfleet.runtime.scope import Scope


class _Current:
    def __init__(self) -> None:
        self.scope = Scope()


_CURRENT = _Current()


def global_scope() -> Scope:
    """Returns the scope that programs run in unless told otherwise."""
    return _CURRENT.scope


@contextmanager
def scope_guard(scope: Scope) -> Iterator[None]:
    """Takes another global scope within a `with`."""
    old, _CURRENT.scope = _CURRENT.scope, scope
    try:
        yield
    finally:
        _CURRENT.scope = old


class Executor:
    """Runs programs.

    Args:
        place: a device; taken, while JAX decides where programs run.
    """

    def __init__(self, place: Any = None) -> None:
        self.place = place
        self._executor = ProgramExecutor()
        self._programs: dict[int, tuple[Program, int, IrProgram]] = {}  # by their ids
        self._entropy = int(np.random.SeedSequence().generate_state(1)[0])
        self._runs = 0
        self._closed = False

    def run(
        self,
        program: Program | None = None,
        feed: Mapping[str, Any] | None = None,
        fetch_list: Sequence[Variable | str] | Variable | str | None = None,
        feed_var_name: str = "feed",
        fetch_var_name: str = "fetch",
        scope: Scope | None = None,
        return_numpy: bool = True,
        use_program_cache: bool = False,
        return_merged: bool = True,
        use_prune: bool = False,
    ) -> list[Any]:
        """Runs a program once; returns what is fetched, in order.

        Raises:
            RuntimeError: the executor was closed.
            TypeError: what is given is no program, or no feed.
            FeedError: what is fed or fetched does not fit.
        """
        del feed_var_name, fetch_var_name, use_program_cache, return_merged, use_prune
        if self._closed:
            raise ClosedError("Attempted to use a closed Executor")
        chosen = default_main_program() if program is None else program
        if not isinstance(chosen, Program):
            raise TypeError(f"Executor runs a Program, not a {type(chosen).__name__}")
        if not isinstance(feed or {}, Mapping):
            raise TypeError(f"a feed is a dict, not a {type(feed).__name__}")
        fetch = _names(fetch_list)
        made = self._prepared(chosen)
        values = scope if scope is not None else global_scope()
        fed = self._fed(made, chosen, dict(feed or {}))
        return self._executor.run(
            made, feed=fed, fetch=fetch, scope=values, return_numpy=return_numpy
        )

    def close(self) -> None:
        """Ends; a later run is an error."""
        self._executor.close()
        self._closed = True

    def _prepared(self, program: Program) -> IrProgram:
        """Returns the program in the IR, made anew when it has changed."""
        known = self._programs.get(id(program))
        if known is None or known[:2] != (program, program.version):
            known = (program, program.version, with_draws(ir_program(program)))
            self._programs[id(program)] = known
        return known[2]

    def _fed(self, made: IrProgram, program: Program, feed: dict[str, Any]) -> dict[str, Any]:
        if RUN in made.variables:
            start = program.random_seed or self._entropy
            feed[RUN] = np.uint32((start + self._runs) % (1 << 32))
            self._runs += 1
        for name in feed:
            if name not in made.variables:
                raise FeedError(f"'{name}' is fed, and the program has no such data")
        return {name: _as_fed(value) for name, value in feed.items()}


def _names(given: Sequence[Variable | str] | Variable | str | None) -> tuple[str, ...]:
    if given is None:
        return ()
    many = [given] if isinstance(given, str | Variable) else given
    if not isinstance(many, list | tuple):
        raise TypeError(f"a fetch_list is a list or tuple, not a {type(given).__name__}")
    return tuple(x if isinstance(x, str) else x.name for x in many)


def _as_fed(value: Any) -> Any:
    """Returns a fed value as a device takes it, where JAX's 64-bit types are off."""
    array = np.asarray(value)
    narrow = ON_DEVICE.get(array.dtype.name)
    return array.astype(narrow) if narrow is not None else array
