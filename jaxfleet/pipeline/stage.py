"""One step of a pipeline, as instruments see it, and the texts in which it can be read."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from jaxfleet.ir import Operator, Program, Role, print_folded, print_program, unified_diff
from jaxfleet.pipeline.base import Pass

# Every one of these moves data between devices or processes, or waits for one.
_COMMUNICATION = frozenset(
    {"send", "recv", "send_barrier", "fetch_barrier", "listen_and_serv", "prefetch", "push_rows"}
)


@dataclass(frozen=True)
class Stage:
    """What one pass of a pipeline did. The first stage has no pass: it is the pipeline's input.

    Attributes:
        index: 0 for the input, then the passes counted from 1.
        pass_: the pass that ran, or None for the input.
        before: the program that it was given.
        after: the program that it returned.
        seconds: how long it ran.
        verify_seconds: how long it took to verify what it returned.
    """

    index: int
    pass_: Pass | None
    before: Program
    after: Program
    seconds: float = 0.0
    verify_seconds: float = 0.0

    @property
    def name(self) -> str:
        """The pass's name, `input` for the input."""
        return self.pass_.name if self.pass_ is not None else "input"

    @property
    def label(self) -> str:
        """What files call it: `01_grad_allreduce`."""
        return f"{self.index:02}_{self.name}"

    def __repr__(self) -> str:
        change = "changed" if self.changed else "unchanged"
        return f"Stage({self.label}: {self.after!r}, {change})"

    @cached_property
    def changed(self) -> bool:
        """Whether the pass returned another program than it was given."""
        return self.before is not self.after and self.before != self.after

    @cached_property
    def made(self) -> Counter[str]:
        """How many operators of each type the pass marked as made by it."""
        if self.pass_ is None:
            return Counter()
        return _made_by(self.name, self.after) - _made_by(self.name, self.before)

    @cached_property
    def text(self) -> str:
        """The program after the pass, folded to what the pass made and what communicates."""
        return print_folded(self.after, keep=self.keeps, source=True)

    @cached_property
    def full_text(self) -> str:
        """The whole program after the pass, with source lines; it can be parsed again."""
        return print_program(self.after, source=True)

    @cached_property
    def diff(self) -> str:
        """What the pass changed, as a unified diff of the whole texts, without source lines."""
        return self.diff_text()

    def diff_text(self, *, source: bool = False) -> str:
        """Returns what the pass changed, as a unified diff of the whole texts.

        Args:
            source: add the user's source lines as comments.
        """
        return unified_diff(self.before, self.after, source=source)

    def keeps(self, op: Operator) -> bool:
        """Tells whether an operator is shown where the program is folded."""
        return communicates(op) or (self.pass_ is not None and op.source.made_by == self.name)


Instrument: TypeAlias = Callable[[Stage], None]


def communicates(op: Operator) -> bool:
    """Tells whether an operator moves data between devices or processes."""
    by_role = op.role in {Role.RPC, Role.DIST}
    return by_role or op.type.startswith("c_") or op.type in _COMMUNICATION


def _made_by(name: str, program: Program) -> Counter[str]:
    return Counter(
        op.type for block in program.blocks for op in block.ops if op.source.made_by == name
    )
