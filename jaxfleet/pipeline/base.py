"""The base class of passes."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from jaxfleet.ir import Operator, Program


@dataclass(frozen=True)
class Pass(ABC):
    """Rewrites programs. A subclass is a frozen dataclass whose fields are the pass's options.

    Attributes:
        name: its name in pipelines and dumps, set by `register_pass`.
        runs_after: passes that must not come later in the same pipeline. They may be absent, since
            a program can be the printed output of an earlier pipeline; a pass itself checks its
            program for what it requires.
    """

    name: ClassVar[str] = ""
    runs_after: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def run(self, program: Program) -> Program:
        """Returns the rewritten program, and leaves its argument unchanged.

        Both are valid. Operators that the pass inserts are marked with `made_by`, so that dumps can
        name it.
        """


def made_by(op: Operator, pass_: Pass) -> Operator:
    """Returns the operator with the pass recorded in its source as its maker.

    The user's source line stays: give the operator the source of the one it serves.
    """
    return replace(op, source=replace(op.source, made_by=pass_.name))
