"""Captures a training step: with the batch as a letter where that is sound, else by its size."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax

from jaxfleet.capture.check import find_difference
from jaxfleet.capture.signature import Signature
from jaxfleet.capture.trace import Traced, trace
from jaxfleet.errors import CaptureError
from jaxfleet.ir import Program
from jaxfleet.ir.source import Source
from jaxfleet.ops.frames import line_of_caller, line_of_error

Step: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]


@dataclass(frozen=True)
class Captured:
    """A captured training step.

    Attributes:
        program: what one step does.
        signature: how the pytrees of state and batch map to its variables.
        metrics: the variables of the metrics, in the order of their leaves.
        metrics_tree: the structure of the metrics.
        notes: what was decided, a line each, for `explain()`.
        rows: the global batch it was traced for; None where the batch is a letter.
    """

    program: Program
    signature: Signature
    metrics: tuple[str, ...]
    metrics_tree: Any
    notes: tuple[str, ...]
    rows: int | None
    _at: Callable[[int], "Captured"] | None = field(default=None, repr=False, compare=False)

    def at(self, rows: int) -> "Captured":
        """Returns the step captured for a global batch of `rows`: itself where that is a letter.

        Raises:
            Exception: whatever the user's step raises for this batch size.
        """
        return self if self._at is None else self._at(rows)


def capture(step: Step, *, example: tuple[Any, Any], name: str | None = None) -> Captured:
    """Captures a training step as a program.

    The batch is a letter, so that one capture serves every batch size. Whether that is sound is
    checked against traces at the example's size and at one row more; where it is not, the step is
    captured for the example's size, and `Captured.at` captures it for others.

    Args:
        step: takes `(state, batch)` and returns `(state, metrics)`; jitted or not.
        example: a state and a batch; arrays, or their types.
        name: the program's name; the step's own where it is left out.

    Raises:
        CaptureError: the step is not of the form that can be captured, or the example is not.
        Exception: whatever the user's step raises.
    """
    state, batch = _pair_of(example)
    signature = Signature.of(state, batch)
    title = name if name is not None else _name_of(step)
    symbolic, refusal = _trace_with_letter(step, signature, title)
    concrete = trace(step, signature, rows=signature.rows, name=title)
    if symbolic is not None:
        leaves = [*jax.tree_util.tree_leaves(state), *jax.tree_util.tree_leaves(batch)]
        check = _Check(step, signature, title, symbolic, leaves)
        refusal = check.at_example(concrete) or check.at_one_more()
        if refusal is None:
            return _captured(symbolic, signature, None, ())
    return _captured_by_size(step, concrete, signature, f"captured for each batch size: {refusal}")


@dataclass(frozen=True)
class _Check:
    """Checks a trace with a letter against traces at numbers of rows."""

    step: Step
    signature: Signature
    name: str
    symbolic: Traced
    leaves: Sequence[Any]

    def at_example(self, concrete: Traced) -> str | None:
        """Returns why the letter does not serve the example's size, or None."""
        return self._compare(concrete, self.signature.rows)

    def at_one_more(self) -> str | None:
        """Returns why it does not serve one row more, or None: also where no batch has so many."""
        rows = self.signature.rows + 1
        try:
            concrete = trace(self.step, self.signature, rows=rows, name=self.name)
        except Exception:  # noqa: BLE001  # the step may well want an even number of rows
            return None
        return self._compare(concrete, rows)

    def _compare(self, concrete: Traced, rows: int) -> str | None:
        found = find_difference(self.symbolic, concrete, self.signature, self.leaves, rows)
        if found is None:
            return None
        place = _place(found.op.source if found.op is not None else None)
        return f"with {rows} rows the step computes '{found.names[0]}' in another way ({place})"


def _captured_by_size(step: Step, first: Traced, signature: Signature, note: str) -> Captured:
    """Returns a step captured at the signature's size, that is traced again for every other."""

    @functools.cache
    def at(rows: int) -> Captured:
        if rows == signature.rows:
            return captured
        traced = trace(step, signature, rows=rows, name=first.program.name)
        return _captured(traced, signature.with_rows(rows), rows, (note,), at)

    captured = _captured(first, signature, signature.rows, (note,), at)
    return captured


def _captured(
    traced: Traced,
    signature: Signature,
    rows: int | None,
    notes: tuple[str, ...],
    at: Callable[[int], Captured] | None = None,
) -> Captured:
    names, tree = traced.metrics, traced.metrics_tree
    return Captured(traced.program, signature, names, tree, notes, rows, at)


def _pair_of(example: Any) -> tuple[Any, Any]:
    if isinstance(example, tuple) and len(example) == 2:
        return example
    what = f"the example is a {type(example).__name__}, not a pair"
    hint = "write example=(state, batch)"
    raise CaptureError(what, source=line_of_caller(), hint=hint)


def _name_of(step: Any) -> str:
    while isinstance(step, functools.partial):
        step = step.func
    return str(getattr(step, "__name__", type(step).__name__))


def _trace_with_letter(
    step: Step, signature: Signature, name: str
) -> tuple[Traced | None, str | None]:
    """Returns the trace, or why there is none."""
    try:
        return trace(step, signature, rows=None, name=name), None
    except Exception as error:  # noqa: BLE001  # the trace at the example's size tells whose it is
        return None, _reason(error)


def _reason(error: Exception) -> str:
    """Returns the error as one line, with the user's line that it came from."""
    text = " ".join(str(error).split()) or type(error).__name__
    sentence = text.split(". ")[0]
    shown = sentence if len(sentence) <= _LONGEST else f"{sentence[:_LONGEST]}..."
    return f"{shown} ({_place(line_of_error(error))})"


def _place(line: Source | None) -> str:
    return " ".join(line.where().split()) if line is not None else "no line of yours"


_LONGEST = 200  # characters of somebody else's error message
