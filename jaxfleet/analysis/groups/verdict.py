"""What is said of optimize groups, and how it reads."""

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jaxfleet.analysis.groups.graph import Graph
from jaxfleet.errors import ProgramError
from jaxfleet.ir import Operator, Program, Variable, print_operator


class Rows(enum.Enum):
    """Whether a group can run on some rows of its parameter alone.

    `row-local`: row i of everything it writes depends on row i of what it reads, and on nothing
    else that has rows. `row-reducing`: but for sums (maxima, ...) over the rows, which have to be
    completed over all slices. `keep-whole`: anything else.
    """

    LOCAL = "row-local"
    REDUCING = "row-reducing"
    WHOLE = "keep-whole"


@dataclass(frozen=True)
class Reason:
    """Why a group is not separable, or not row-local.

    Attributes:
        text: a sentence without its subject.
        op: the first operator that makes it so, if it is one.
    """

    text: str
    op: Operator | None = None

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
class Group:
    """The operators that update one parameter, and what is known of them.

    Attributes:
        param: the parameter.
        gradients: its gradients; more than one where two optimizers update it.
        state: the state leaves that are its own.
        shared: what it reads besides: values of the learning-rate block, the data, other
            parameters.
        ops: its operators, by their place in block 0. One that reads no parameter and makes an
            array may be in several groups: each makes its own.
        program: these operators as a program of their own; `shared` and gradients are fed. What
            other parameters need of this one is fetched.
        sources: the value of the section's graph that each variable fed to `program` stands for.
        crossing: why it is not separable, or None.
        others: the parameters that its update depends on besides its own.
        rows: whether it can run on some rows alone.
        reason: why it is not row-local, or None.
    """

    param: Variable
    gradients: tuple[str, ...]
    state: tuple[str, ...]
    shared: tuple[str, ...]
    ops: tuple[int, ...]
    program: Program = field(repr=False)
    sources: Mapping[str, int] = field(repr=False)
    crossing: Reason | None
    others: tuple[str, ...]
    rows: Rows
    reason: Reason | None

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.param.name

    @property
    def is_separable(self) -> bool:
        """Tells whether the update reads no other parameter, gradient or state of one."""
        return self.crossing is None


@dataclass(frozen=True)
class OptimizeGroups:
    """The optimize section of a program, sorted by parameter.

    Attributes:
        graph: the optimize section as values.
        groups: one for each parameter, in their order.
        lr_ops: the operators of the learning-rate block: schedules, counters, bias corrections.
        lr_state: the state that it keeps.
        crossing_ops: the operators that bring several parameters together for an update.
        crossing_state: the state that they keep.
        other_ops: the operators that no update needs: metrics of the optimizer.
    """

    graph: Graph = field(repr=False)
    groups: tuple[Group, ...]
    lr_ops: tuple[int, ...]
    lr_state: tuple[str, ...]
    crossing_ops: tuple[int, ...]
    crossing_state: tuple[str, ...]
    other_ops: tuple[int, ...]

    @property
    def program(self) -> Program:
        """What the places of operators refer to: the program, with its branches split."""
        return self.graph.program

    def group(self, param: str) -> Group:
        """Returns the group of a parameter.

        Raises:
            ProgramError: the program has no such parameter.
        """
        for group in self.groups:
            if group.name == param:
                return group
        known = ", ".join(group.name for group in self.groups[:5])
        what = f"'{param}' is no parameter of '{self.program.name}'"
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
        # What parameters have in common is said once, with the operator of the first.
        reasons: dict[str, Reason] = {}
        names: dict[str, list[str]] = {}
        for group in self.groups:
            for verdict, reason in (("crosses", group.crossing), (group.rows.value, group.reason)):
                if reason is not None:
                    what = f"{verdict}: {reason.headline}"
                    reasons.setdefault(what, reason)
                    names.setdefault(what, []).append(group.name)
        for what, reason in reasons.items():
            yield f"  {listed(names[what])}: {what}"
            if reason.op is not None:
                yield f"    {print_operator(reason.op)}"


def _table(groups: tuple[Group, ...]) -> Iterator[str]:
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
    return f"{text}, state {listed(state)}" if state else text


_MOST_NAMES = 4  # in a line; a model has hundreds


def listed(names: Sequence[str]) -> str:
    """Returns names as a sentence has them; of many, the first few."""
    shown, more = list(names[:_MOST_NAMES]), len(names) - _MOST_NAMES
    if more > 0:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join(part for part in (", ".join(shown[:-1]), *shown[-1:]) if part)
