"""Captured training steps, with a symbolic batch size where that is sound."""

import contextlib
import functools
import gc
import inspect
import threading
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jaxfleet.capture.arguments import Arguments, check_batch, names_of, read_arguments
from jaxfleet.capture.nnx_objects import check_shared, has_objects
from jaxfleet.capture.primitives import NOT_WRAPPED, traced_before
from jaxfleet.capture.signature import Signature, is_iterator
from jaxfleet.capture.trace import Step, Traced, trace, types_of_results
from jaxfleet.capture.trace_equivalence import different_results, unlike
from jaxfleet.errors import CaptureError, JaxfleetError
from jaxfleet.ir import Program
from jaxfleet.ir.source import Source
from jaxfleet.ops.jax_adapter import dtype_text
from jaxfleet.ops.user_frames import line_of_caller, line_of_error, line_of_function


@dataclass(frozen=True)
class Captured:
    """A captured training step.

    Attributes:
        program: the computation of one step.
        signature: mapping of the pytrees of state and batch to variables.
        metrics: the variables of the metrics, in the order of their leaves.
        metrics_tree: the structure of the metrics.
        notes: decisions, a line each, for `explain()`.
        rows: the global batch size of the trace; None if symbolic.
        keys: the leaves of the batch that are only keys of tables: integers of any type, as only
            the host reads them.
        arguments: of a step that takes more than a state and a batch; else None.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jaxfleet as jf
        >>> def add_rows(total, batch):
        ...     return total + batch.sum(0), {"largest": batch.max()}
        >>> captured = jf.capture(add_rows, example=(jnp.zeros(2), jnp.ones((4, 2))))
        >>> captured.metrics, captured.rows
        (('metrics/largest',), None)
    """

    program: Program
    signature: Signature
    metrics: tuple[str, ...]
    metrics_tree: Any
    notes: tuple[str, ...]
    rows: int | None
    keys: frozenset[str] = frozenset()
    arguments: Arguments | None = None
    _at: Callable[[int], "Captured"] | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"Captured({self.program!r})"

    def at(self, rows: int) -> "Captured":
        """Returns the step captured for a global batch of `rows`: itself if that is symbolic.

        Raises:
            Exception: whatever the user's step raises for this batch size.
        """
        return self if self._at is None else self._at(rows)


def capture(
    step: Callable[..., Any], *, example: tuple[Any, ...], name: str | None = None
) -> Captured:
    """Captures a training step as a program.

    The batch size is symbolic, so that one capture serves every size. Whether that is sound is
    checked against traces at the example's size and at one row more; if it is not, the step is
    captured for the example's size, and `Captured.at` captures it for others.

    Args:
        step: takes `(state, batch)` and returns `(state, metrics)`; jitted or not. Or it takes
            more, such as `(params, opt_state, x, y)`, and returns new values of its leading
            arguments, with metrics before or behind them.
        example: its arguments; arrays, or their types.
        name: the program's name; by default the step's.

    Raises:
        CaptureError: the step or the example cannot be captured.
        Exception: whatever the user's step raises.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jaxfleet as jf
        >>> def add_rows(total, batch):
        ...     return total + batch.sum(0), {}
        >>> print(jf.capture(add_rows, example=(jnp.zeros(2), jnp.ones((4, 2)))).program)
        program add_rows {batch=<b>}
          data  batch: f32[b,2]
          state state: f32[2]
          block 0
            forward
              reduce_sum.1: f32[2] = jax.reduce_sum(batch) {axes=[0]}
              state = jax.add(state, reduce_sum.1)
    """
    _check_callable(step, example)
    with rare_collections(), _noting_arguments(step, example):
        check_shared(names_of(step, example), example)
        arguments = _arguments(step, example)
        if arguments is None:
            return _capture(step, (example[0], example[1]), name)
        check_batch(arguments, example)
        found = _capture(arguments.adapted(step), arguments.split(example), name)
    return replace(found, arguments=arguments, notes=(arguments.note(), *found.notes))


def _arguments(step: Callable[..., Any], example: tuple[Any, ...]) -> Arguments | None:
    """Returns the arguments of a step; None for `(state, batch)` to `(state, metrics)`."""
    if len(example) > _PAIR:
        return read_arguments(step, example, types_of_results)
    if not has_objects(example):
        return None
    try:
        found = read_arguments(step, example, types_of_results)
    except CaptureError:  # the check of a pair has more to say
        return None
    return found if found.in_place else None


@contextlib.contextmanager
def _noting_arguments(step: Callable[..., Any], example: tuple[Any, ...]) -> Iterator[None]:
    """Adds a call's arguments to the user's exceptions: the example may be out of order."""
    try:
        yield
    except JaxfleetError:
        raise
    except Exception as error:
        names = names_of(step, example)
        called = f"{_name_of(step)}({', '.join(names)})"
        given = ", ".join(map(_is_given, names, example))
        error.add_note(f"  note: {called} was called with the example's types: {given}")
        order = f"example=({', '.join(names)})"
        error.add_note(f"  hint: where this is not what the arguments are, write {order}")
        raise


def _is_given(name: str, value: Any) -> str:
    """Returns a name and its value's type: `x: f32[8,3]`, `state: dict of 3 arrays`."""
    leaves = jax.tree_util.tree_leaves(value, is_leaf=is_iterator)
    if is_iterator(value) or jax.tree_util.all_leaves([value]):
        dtype = getattr(value, "dtype", None)
        of = type(value).__name__ if dtype is None else dtype_text(dtype)
        return f"{name}: {of}[{','.join(map(str, np.shape(value)))}]"
    return f"{name}: {type(value).__name__} of {len(leaves)} array{'s' * (len(leaves) != 1)}"


def _capture(step: Step, example: tuple[Any, Any], name: str | None) -> Captured:
    state, batch = example
    signature = Signature.of(state, batch)
    source = _Source(step, signature, name if name is not None else _name_of(step))
    symbolic, refusal = _with_letter(source)
    concrete = source.at(signature.rows, refused=refusal is not None)
    notes = _notes_on_types((state, batch), signature, keys=concrete.keys)
    if symbolic is not None:
        check = _Check(source, symbolic)
        refusal = check.at_example(concrete) or check.at_one_more()
        if refusal is None:
            return _captured(symbolic, signature, None, notes)
    notes = (*notes, f"captured for each batch size: {refusal}")
    return _captured_by_size(source, concrete, notes)


@dataclass(frozen=True)
class _Source:
    """The user's step, traced for one signature."""

    step: Step
    signature: Signature
    name: str

    def trace(self, rows: int | None) -> Traced:
        return trace(self.step, self.signature, rows=rows, name=self.name)

    def at(self, rows: int, *, refused: bool) -> Traced:
        """Returns the trace for a number of rows, and lets its errors reach the user."""
        try:
            return self.trace(rows)
        except Exception as error:
            if not refused and NOT_WRAPPED in str(error):  # the symbolic trace made it retrace
                raise traced_before(line_of_function(self.step)) from error
            if not refused:
                error.add_note(
                    f"  note: the step traced once before, with the batch as a letter, and fails "
                    f"with {rows} rows; it must not keep values of one trace for the next"
                )
            raise


def _with_letter(source: _Source) -> tuple[Traced | None, str | None]:
    """Returns the symbolic trace, or the reason for its failure."""
    try:
        return source.trace(None), None
    except Exception as error:  # noqa: BLE001  # the example's trace shows whose it is
        return None, _reason(error)


@dataclass(frozen=True)
class _Check:
    """Checks a symbolic trace against traces at numbers of rows."""

    source: _Source
    symbolic: Traced

    def at_example(self, concrete: Traced) -> str | None:
        """Returns why the symbolic trace is wrong at the example's size, or None."""
        rows = self.source.signature.rows
        refusal = self._compare(concrete, rows)
        if refusal is not None and (found := unlike(concrete, self.source.trace(rows), rows)):
            what = f"the step computes '{found.names[0]}' in another way each time it is traced"
            hint = "draw random numbers with jax.random, from a key in the state"
            raise CaptureError(what, op=found.op, hint=hint)
        return refusal

    def at_one_more(self) -> str | None:
        """Returns why it is wrong at one row more; None also if no such batch exists."""
        rows = self.source.signature.rows + 1
        try:
            concrete = self.source.trace(rows)
        except Exception:  # noqa: BLE001  # the step may require an even number of rows
            return None
        return self._compare(concrete, rows)

    def _compare(self, concrete: Traced, rows: int) -> str | None:
        found = different_results(self.symbolic, concrete, rows)
        if found is None:
            return None
        place = _place(found.op.source if found.op is not None else None)
        return f"with {rows} rows the step computes '{found.names[0]}' in another way ({place})"


def _captured_by_size(source: _Source, first: Traced, notes: tuple[str, ...]) -> Captured:
    """Returns a step captured at the signature's size, and traced again for every other."""
    signature = source.signature

    @functools.cache
    def at(rows: int) -> Captured:
        if rows == signature.rows:
            return captured
        return _captured(source.trace(rows), signature.with_rows(rows), rows, notes, at)

    captured = _captured(first, signature, signature.rows, notes, at)
    return captured


def _captured(
    traced: Traced,
    signature: Signature,
    rows: int | None,
    notes: tuple[str, ...],
    at: Callable[[int], Captured] | None = None,
) -> Captured:
    names, tree = traced.metrics, traced.metrics_tree
    said = (*traced.notes, *notes)
    return Captured(traced.program, signature, names, tree, said, rows, traced.keys, _at=at)


def _notes_on_types(
    example: tuple[Any, Any], signature: Signature, *, keys: Container[str]
) -> tuple[str, ...]:
    """Returns a line for each numpy type that jax narrows, except for keys of tables."""
    leaves = zip(
        (*signature.state, *signature.batch), jax.tree_util.tree_leaves(example), strict=True
    )
    narrowed: dict[tuple[str, str], list[str]] = {}
    for leaf, value in leaves:
        if leaf.name in keys:
            continue
        if isinstance(value, np.ndarray | np.generic) and value.dtype != leaf.dtype:
            narrowed.setdefault((value.dtype.name, leaf.dtype.name), []).append(leaf.name)
    return tuple(
        f"{', '.join(names)}: {was} is taken as {now}, since jax_enable_x64 is off"
        for (was, now), names in narrowed.items()
    )


def _check_callable(step: Any, example: Any) -> None:
    if not callable(step):
        what = f"the training step is of type {type(step).__name__}, not a function"
        raise CaptureError(what, source=line_of_caller(), hint="pass the function itself first")
    if not isinstance(example, tuple) or len(example) < _PAIR:
        found = f"of type {type(example).__name__}"
        if isinstance(example, tuple):
            found = f"a tuple of {len(example)}"
        what = f"the example is {found}, not a tuple of all the step's arguments"
        hint = "write example=(state, batch), or all arguments in their order"
        raise CaptureError(what, source=line_of_caller(), hint=hint)
    try:
        arguments = inspect.signature(step)
    except (TypeError, ValueError):  # a function not written in Python has none
        return
    try:
        arguments.bind(*example)
    except TypeError as error:
        names = _required(arguments)
        pair = len(example) == _PAIR
        given = "as step(state, batch)" if pair else f"with {len(example)} arguments"
        what = f"{_name_of(step)}{arguments} cannot be called {given}: {error}"
        hint = f"example=({', '.join(names)}): a random key goes whole to every device; "
        hint += "bind what is not an array, static arguments too, with functools.partial"
        raise CaptureError(what, source=line_of_function(step), hint=hint) from None


def _required(signature: inspect.Signature) -> list[str]:
    kinds = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    parameters = signature.parameters.values()
    return [p.name for p in parameters if p.kind in kinds and p.default is p.empty]


def _name_of(step: Any) -> str:
    while isinstance(step, functools.partial):
        step = step.func
    return str(getattr(step, "__name__", type(step).__name__))


def _reason(error: Exception) -> str:
    """Returns the error as one line, with the line of the user's program."""
    text = " ".join(str(error).split()) or type(error).__name__
    sentence = text.split(". ")[0]
    shown = sentence if len(sentence) <= _LONGEST else f"{sentence[:_LONGEST]}..."
    advice = next((f"; {change}" for part, change in _INSTEAD.items() if part in text), "")
    return f"{shown} ({_place(line_of_error(error))}){advice}"


def _place(line: Source | None) -> str:
    return " ".join(line.where().split()) if line is not None else "no line of yours"


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Runs the cyclic garbage collector rarely until the block ends.

    A collection walks live objects, and nearly all objects of a trace are live: it took 30 % of the
    CPU seconds of distributing two nets of scanned layers, and takes a tenth when it runs rarely.
    Garbage stays bounded. Only the main thread changes this process-wide setting, so that it can
    restore it.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < _OBJECTS or threading.current_thread() is not threading.main_thread():
        yield
        return
    gc.set_threshold(_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


_OBJECTS = 50_000  # allocations between two collections; Python's default is 700
_INSTEAD = {  # by a part of jax's message about a failed symbolic trace
    "Cannot divide evenly": (
        "to keep any size, write x.reshape(n, x.shape[0] // n, ...) instead of a size of -1"
    ),
    "interpreted as an integer": (
        "to keep any size, use jnp where Python or numpy takes the number of rows: jnp.mean for "
        "a sum over float(len(x)), jnp.arange(x.shape[0]) for a range"
    ),
    "requires a constant": (
        "to keep any size, do not compare the number of rows in Python, and draw random orders "
        "outside of the step"
    ),
    "inconclusive": "to keep any size, do not compare the number of rows in Python",
}
_PAIR = 2  # a state and a batch
_LONGEST = 200  # characters of a third-party error message
