"""The result of the analysis: optimizer groups, the reasons for their limits, and their text."""

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from jaxfleet.analysis.optimizer_groups.optimize_section import SectionGraph
from jaxfleet.errors import ProgramError
from jaxfleet.ir import Operator, Program, Variable, print_operator


class RowLocality(enum.Enum):
    """Whether a group can run on some rows of its parameter alone.

    `row-local`: row i of everything it writes depends on row i of its operands, and on nothing else
    that has rows. `row-reducing`: the same except for sums (maxima, ...) over the rows, which must
    be completed over all slices. `keep-whole`: anything else.
    """

    LOCAL = "row-local"
    REDUCING = "row-reducing"
    WHOLE = "keep-whole"


@dataclass(frozen=True)
class Reason:
    """Why a group is not separable, or not row-local."""

    text: str  # a sentence without its subject
    op: Operator | None = None  # the first operator that causes it, if any

    def __str__(self) -> str:
        return (
            self.headline if self.op is None else f"{self.headline}\n    {print_operator(self.op)}"
        )

    @property
    def headline(self) -> str:
        """The text with the user's line, without the operator."""
        where = " ".join(self.op.source.where().split()) if self.op is not None else ""
        return f"{self.text} ({where})" if where else self.text


@dataclass(frozen=True)
class OptimizerGroup:
    """The operators that update one parameter, and their properties."""

    param: Variable
    gradients: tuple[str, ...]  # its gradients; more than one if two optimizers update it
    state: tuple[str, ...]  # the state leaves that are its own
    # its other inputs: values of the learning-rate block, the data, other parameters
    shared: tuple[str, ...]
    # its operators, by their place in block 0. One that reads no parameter and makes an array may
    # be in several groups: each makes its own
    ops: tuple[int, ...]
    # these operators as a separate program; `shared` and gradients are fed. Values that other
    # parameters need are fetched
    program: Program = field(repr=False)
    # the value of the section's graph that each variable fed to `program` represents
    sources: Mapping[str, int] = field(repr=False)
    crossing: Reason | None  # why it is not separable, or None
    others: tuple[str, ...]  # the parameters that its update depends on besides its own
    rows: RowLocality  # whether it can run on some rows alone
    reason: Reason | None  # why it is not row-local, or None

    @property
    def name(self) -> str:
        return self.param.name

    @property
    def is_separable(self) -> bool:
        """Whether the update reads no other parameter, gradient or state of one."""
        return self.crossing is None


@dataclass(frozen=True)
class OptimizerGroups:
    """The optimize section of a program, sorted by parameter."""

    graph: SectionGraph = field(repr=False)
    groups: tuple[OptimizerGroup, ...]  # one for each parameter, in their order
    # the operators of the learning-rate block: schedules, counters, bias corrections
    lr_ops: tuple[int, ...]
    lr_state: tuple[str, ...]  # the state that it keeps
    crossing_ops: tuple[int, ...]  # the operators that combine several parameters for an update
    crossing_state: tuple[str, ...]  # the state that they keep
    other_ops: tuple[int, ...]  # the operators that no update needs: metrics of the optimizer

    @property
    def program(self) -> Program:
        """The program, with its branches split, that the places of operators refer to."""
        return self.graph.program

    @cached_property
    def _by_name(self) -> Mapping[str, OptimizerGroup]:
        return {group.name: group for group in self.groups}

    def group(self, param: str) -> OptimizerGroup:
        """Returns the group of a parameter; raises a ProgramError if there is none."""
        if param in self._by_name:
            return self._by_name[param]
        known = ", ".join(group.name for group in self.groups[:5])
        what = f"'{param}' is not a parameter of '{self.program.name}'"
        raise ProgramError(what, hint=f"its parameters are {known}")

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        count = len(self.groups)
        yield f"optimize groups of {self.program.name}: {count} parameter{'s' * (count != 1)}"
        yield from _table(self.groups)
        if self.lr_ops:
            yield f"  learning-rate block: {_size(self.lr_ops, self.lr_state)}"
        if self.crossing_ops:
            yield f"  across parameters: {_size(self.crossing_ops, self.crossing_state)}"
        # A reason that parameters share is printed once, with the operator of the first.
        reasons: dict[str, Reason] = {}
        names: dict[str, list[str]] = {}
        for group in self.groups:
            for verdict, reason in (("crosses", group.crossing), (group.rows.value, group.reason)):
                if reason is not None:
                    what = f"{verdict}: {reason.headline}"
                    reasons.setdefault(what, reason)
                    names.setdefault(what, []).append(group.name)
        for what, reason in reasons.items():
            yield f"  {joined_names(names[what])}: {what}"
            if reason.op is not None:
                yield f"    {print_operator(reason.op)}"


def _table(groups: tuple[OptimizerGroup, ...]) -> Iterator[str]:
    rows = [
        (
            group.name,
            group.param.type,
            "separable" if group.is_separable else f"crosses {len(group.others)}",
            group.rows.value,
            _size(group.ops, group.state),
        )
        for group in groups
    ]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()


def _size(ops: tuple[int, ...], state: tuple[str, ...]) -> str:
    text = f"{len(ops)} operator{'s' * (len(ops) != 1)}"
    return f"{text}, state {joined_names(state)}" if state else text


_MOST_NAMES = 4  # in a line; a model may have hundreds


def joined_names(names: Sequence[str]) -> str:
    """Joins names as in a sentence; of many, the first few."""
    shown, more = list(names[:_MOST_NAMES]), len(names) - _MOST_NAMES
    if more > 0:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join(part for part in (", ".join(shown[:-1]), *shown[-1:]) if part)
