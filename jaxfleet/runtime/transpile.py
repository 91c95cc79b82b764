"""Runs passes on programs, recorded and dumped; `memory_optimize` and `release_memory`."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, overload, runtime_checkable

from jaxfleet.analysis.step_checks import meaning_rules
from jaxfleet.capture import Captured
from jaxfleet.capture.trace import BATCH_LETTER
from jaxfleet.env import read_environment
from jaxfleet.errors import ProgramError, WrongTypeError
from jaxfleet.ir import Program, Variable
from jaxfleet.ir.inline import specialize
from jaxfleet.ops.user_frames import line_of_caller
from jaxfleet.passes import MemoryOptimize, ReleaseMemory
from jaxfleet.passes.pipelines import gloo_pipeline, may_have_slices, slicing_passes
from jaxfleet.pipeline import Dump, Instrument, Pass, Record, Stage, new_dump_folder, run_pipeline


def over_gloo(devices: Sequence[Any]) -> bool:
    """Whether devices are CPUs of several processes, which gloo connects."""
    processes = {device.process_index for device in devices}
    return len(processes) > 1 and all(device.platform == "cpu" for device in devices)


def summed_over(devices: Sequence[Any], *, joins: bool = True) -> tuple[Pass, ...]:
    """Returns the passes for a program's all-reduces over these devices; none except over gloo.

    `joins` allows fusing small values.
    """
    return gloo_pipeline(len(devices), joins=joins) if over_gloo(devices) else ()


def transpile(
    program: Program,
    passes: Sequence[Pass],
    *,
    dump_dir: Path | None,
    series: Instrument | None = None,
) -> tuple[Program, Record]:
    """Runs passes; returns the result with the record of every pass.

    Dumps go to `dump_dir`, by default the environment's, unless `series` takes the stages.
    """
    record = Record()
    instruments: list[Instrument] = [record]
    environment = read_environment()
    folder = dump_dir
    if series is not None:
        instruments.append(series)
    elif folder is None and environment.dump_dir is not None:
        folder = new_dump_folder(environment.dump_dir, program.name)
    if folder is not None:
        instruments.append(Dump(folder, source=environment.dump_source))
        record.folder = folder
    result = run_pipeline(program, passes, instruments=instruments, rules=meaning_rules)
    return result, record


class DumpSeries:
    """Instruments consecutive pipelines, and numbers their passes consecutively.

    The folder is created at the first stage.

    Args:
        root: where the folder is created, named for the program.
        source: add source lines to the diffs.
        earlier: stages of pipelines that ran before, which other dumps may begin with too.
    """

    def __init__(self, root: Path, *, source: bool = False, earlier: Iterable[Stage] = ()) -> None:
        self._root, self._source, self._earlier = root, source, tuple(earlier)
        self._dump: Dump | None = None
        self._next = 0

    def __call__(self, stage: Stage) -> None:
        """Writes a stage; the input of a later pipeline is the output of the one before."""
        if self._dump is None:
            name = stage.after.name
            self._dump = Dump(new_dump_folder(self._root, name), source=self._source)
            for one in self._earlier:
                self(one)
        if stage.pass_ is None and self._next:
            return
        self._dump(replace(stage, index=self._next))
        self._next += 1

    @property
    def folder(self) -> Path | None:
        """The folder; None before the first stage."""
        return None if self._dump is None else self._dump.folder


def begin_series(earlier: Iterable[Stage] = ()) -> DumpSeries | None:
    """Returns the instrument of a new dump if the environment asks for dumps; else None."""
    environment = read_environment()
    if environment.dump_dir is None:
        return None
    return DumpSeries(environment.dump_dir, source=environment.dump_source, earlier=earlier)


def run_passes(
    program: Program, passes: Sequence[Pass], *, series: DumpSeries | None = None
) -> Program:
    """Runs passes in order, and dumps each into `series` or a new dump.

    The program is verified between passes if they are dumped.
    """
    if series is not None:
        return run_pipeline(program, passes, instruments=[series])
    for pass_ in passes:
        program = pass_.run(program)
    return program


def calls_to_measure() -> int:
    """Returns how many calls of a step are timed for its dump; 0 unless the environment asks."""
    environment = read_environment()
    return environment.dump_measure if environment.dump_dir is not None else 0


def end_if_only_dumping() -> None:
    """Ends the process, by SystemExit, if the environment asks for dumps only."""
    if read_environment().dump_until_compiled:
        raise SystemExit(0)


def for_slices(captured: Captured, rows: int, sharers: int) -> Captured:
    """Returns the step for this number of rows alone, if it accumulates over slices of them.

    Each sharer then has a part of every slice, which requires a concrete number of rows.
    """
    if sharers == 1 or not may_have_slices(captured.program):
        return captured
    program = specialize(captured.program, {} if captured.rows else {BATCH_LETTER: rows})
    sliced = program
    for each in slicing_passes(program, sharers):
        sliced = each.run(sliced)
    if sliced == program:
        return captured
    signature = captured.signature.with_rows(rows)
    return replace(captured, program=program, signature=signature, rows=rows)


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

    Examples:
        >>> import jaxfleet as jf
        >>> from jaxfleet.ir import parse
        >>> program = parse('''
        ... program p
        ...   data  x: f32[4]
        ...   block 0
        ...     forward
        ...       a: f32[4] = jax.exp(x)
        ...       b: f32[4] = jax.sin(a)
        ...       c: f32[4] = jax.cos(b)
        ...       y: f32[4] = jax.tanh(c)
        ... ''')
        >>> print(jf.memory_optimize(program, {"y"}))
        program p
          data  x: f32[4]
          block 0
            temp  c: f32[4]
            forward
              a: f32[4] = jax.exp(x)
              b: f32[4] = jax.sin(a)
              a = jax.cos(b) {instead_of=[["a", "c"]]}
              y: f32[4] = jax.tanh(a)
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

    Examples:
        >>> import jaxfleet as jf
        >>> from jaxfleet.ir import parse
        >>> program = parse('''
        ... program p
        ...   data  x: f32[4]
        ...   block 0
        ...     forward
        ...       a: f32[4] = jax.exp(x)
        ...       b: f32[4] = jax.sin(a)
        ...       c: f32[4] = jax.cos(b)
        ...       y: f32[4] = jax.tanh(c)
        ... ''')
        >>> print(jf.release_memory(program, {"y"}))
        program p
          data  x: f32[4]
          block 0
            forward
              a: f32[4] = jax.exp(x)
              delete_var(X=x)
              b: f32[4] = jax.sin(a)
              delete_var(X=a)
              c: f32[4] = jax.cos(b)
              delete_var(X=b)
              y: f32[4] = jax.tanh(c)
              delete_var(X=c)
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
