"""`memory_optimize` and `release_memory` for programs of either kind.

A program in the IR is immutable: a new one is returned. A fluid program is changed in place, and
None is returned, as fluid's scripts expect.
"""

from collections.abc import Collection
from typing import Any, Protocol, overload, runtime_checkable

from jaxfleet.errors import ProgramError, WrongTypeError
from jaxfleet.ir import Program, Variable
from jaxfleet.ops.user_frames import line_of_caller
from jaxfleet.passes import MemoryOptimize, ReleaseMemory
from jaxfleet.pipeline import Pass
from jaxfleet.runtime.dump_series import begin_series, run_passes


@runtime_checkable
class Rewritable(Protocol):
    """A program that is changed in place: fluid's."""

    def _rewrite_for_memory(self, by: Pass) -> None:
        """Replaces the program by the result of a pass."""
        ...


class Named(Protocol):
    """A variable: fluid's, or the IR's."""

    @property
    def name(self) -> str: ...


Skipped = Collection[str | Named] | None


@overload
def memory_optimize(
    input_program: Program,
    skip_opt_set: Skipped = None,
    print_log: bool = False,
    level: int = 0,
    skip_grads: bool = False,
) -> Program: ...
@overload
def memory_optimize(
    input_program: Rewritable,
    skip_opt_set: Skipped = None,
    print_log: bool = False,
    level: int = 0,
    skip_grads: bool = False,
) -> None: ...
def memory_optimize(
    input_program: Program | Rewritable,
    skip_opt_set: Skipped = None,
    print_log: bool = False,
    level: int = 0,
    skip_grads: bool = False,
) -> Program | None:
    """Lets a program's operators overwrite dead variables instead of allocating new ones.

    See the pass `memory_optimize`. Later fetches read a variable from its new place; overwritten
    variables are rejected.

    Args:
        input_program: a program in the IR, of which a rewritten one is returned; or a fluid
            program, which is changed itself.
        skip_opt_set: a set or list of variables, or their names, that keep a name of their own,
            for later fetches.
        print_log: print which variable takes which one's memory.
        level: 0 for variables of equal shapes, 1 for those that are large enough.
        skip_grads: also keep the names of gradients that updates use.

    Returns:
        The new program; None for a fluid program.

    Raises:
        ValueError: the level is neither 0 nor 1, or `skip_opt_set` is not a set or list.
        TypeError: `input_program` is not a program, or an entry is neither a variable nor a name.
    """
    _check_program(input_program, "memory_optimize")
    if isinstance(level, bool) or level not in (0, 1):
        what = f"memory_optimize: only support opt_level 0 or 1, not {level!r}"
        hint = "0 is for equal shapes, 1 for what is large enough"
        raise ProgramError(what, source=line_of_caller(), hint=hint)
    skip = _names(skip_opt_set, "memory_optimize")
    made = MemoryOptimize(level, skip, skip_grads=bool(skip_grads), print_log=bool(print_log))
    return _rewritten(input_program, made)


@overload
def release_memory(input_program: Program, skip_opt_set: Skipped = None) -> Program: ...
@overload
def release_memory(input_program: Rewritable, skip_opt_set: Skipped = None) -> None: ...
def release_memory(
    input_program: Program | Rewritable, skip_opt_set: Skipped = None
) -> Program | None:
    """Inserts a `delete_var` after the last read of each variable.

    Args:
        input_program: a program in the IR, of which a rewritten one is returned; or a fluid
            program, which is changed itself.
        skip_opt_set: a set or list of variables, or their names, that are not released.

    Returns:
        The new program; None for a fluid program.

    Raises:
        ValueError: `skip_opt_set` is not a set or list.
        TypeError: `input_program` is not a program, or an entry is neither a variable nor a name.
    """
    _check_program(input_program, "release_memory")
    return _rewritten(input_program, ReleaseMemory(_names(skip_opt_set, "release_memory")))


def _rewritten(program: Program | Rewritable, by: Pass) -> Program | None:
    if isinstance(program, Program):
        return run_passes(program, [by], series=begin_series())
    program._rewrite_for_memory(by)  # noqa: SLF001  # the protocol's
    return None


def _check_program(program: object, who: str) -> None:
    if isinstance(program, Program | Rewritable):
        return
    what = f"{who}: a program is wanted, not {type(program).__name__}"
    inner = getattr(program, "program", None)
    hint = "give its .program" if isinstance(inner, Program | Rewritable) else None
    raise WrongTypeError(what, source=line_of_caller(), hint=hint)


def _names(skipped: Any, who: str) -> tuple[str, ...]:
    if skipped is None:
        return ()
    if not isinstance(skipped, set | frozenset | list):
        what = f"{who}: only support skip_opt_set as set, not as {type(skipped).__name__}"
        raise ProgramError(what, source=line_of_caller(), hint="skip_opt_set={loss.name}")
    return tuple(sorted({_name(one, who) for one in skipped}))


def _name(given: Any, who: str) -> str:
    if isinstance(given, str):
        return given
    if isinstance(given, Variable) or _is_variable(given):
        name: str = given.name
        return name
    what = f"{who}: skip_opt_set holds a {type(given).__name__}"
    hint = "name variables, or give them"
    raise WrongTypeError(what, source=line_of_caller(), hint=hint)


def _is_variable(given: Any) -> bool:
    """Whether a value is like fluid's variables, which no module here may import."""
    return all(hasattr(given, name) for name in ("persistable", "stop_gradient")) and isinstance(
        getattr(given, "name", None), str
    )
