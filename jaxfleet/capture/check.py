"""Compares a step that was traced with a letter with the same step traced at a number of rows.

A Python branch on the batch size takes one side in silence when the size is a letter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxfleet.analysis.fingerprint import Numbering
from jaxfleet.capture.equivalence import differing
from jaxfleet.capture.trace import BATCH_LETTER, Traced
from jaxfleet.ir import Kind, Operator, Program


@dataclass(frozen=True)
class Difference:
    """Says in what two traces of one step differ.

    Attributes:
        names: state leaves and metrics that come out otherwise.
        op: the first operator of the second trace that the first has not, or of the first that
            the second has not.
    """

    names: tuple[str, ...]
    op: Operator | None


def unlike(left: Traced, right: Traced, rows: int) -> Difference | None:
    """Returns how two traces of one step are built otherwise, dead operators aside.

    Args:
        left: traced with a letter, or with a number of rows.
        right: traced with a number of rows.
        rows: what the letter stands for.
    """
    numbering = Numbering({BATCH_LETTER: rows})
    before, after = numbering.of(left.program), numbering.of(right.program)
    names = tuple(name for name in _returned(left) if before[name] != after[name])
    if not names:
        return None

    def new(program: Program, numbers: Mapping[str, int], others: Mapping[str, int]) -> Any:
        known = set(others.values())
        for op in program.root.ops:
            made = [numbers[name] for name in op.writes]
            if not known.issuperset(made) and numbering.known(made) is None:
                return op
        return None

    first = new(right.program, after, before) or new(left.program, before, after)
    return Difference(names, first)


def different_results(symbolic: Traced, concrete: Traced, rows: int) -> Difference | None:
    """Returns how a step traced with a letter differs from one traced at a number of rows.

    Where the two are built otherwise, since jax does some things in another way under a letter,
    the parts that differ are computed, on random values.

    Args:
        symbolic: traced with a letter.
        concrete: traced with `rows` rows.
        rows: what the letter stands for.
    """
    found = unlike(symbolic, concrete, rows)
    if found is None:
        return None
    sizes = {BATCH_LETTER: rows}
    names = differing(symbolic.program, concrete.program, found.names, sizes)
    return replace(found, names=names) if names else None


def _returned(traced: Traced) -> list[str]:
    lasting = traced.program.of_kind(Kind.PARAM, Kind.STATE)
    return [*(variable.name for variable in lasting), *traced.metrics]
