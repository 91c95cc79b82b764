"""What a pass is: a program in, a program out, and options that are its fields."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from jaxfleet.ir import Operator, Program


@dataclass(frozen=True)
class Pass(ABC):
    """Rewrites programs. A subclass is a frozen dataclass whose fields are the pass's options.

    Attributes:
        name: what pipelines and dumps call it; `register_pass` sets it.
        runs_after: passes that must not come later in the same pipeline. They may be missing
            from it, since a program can be the text that an earlier pipeline printed; what a pass
            needs to find in its program, it checks itself.
    """

    name: ClassVar[str] = ""
    runs_after: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def run(self, program: Program) -> Program:
        """Returns the rewritten program, and leaves the one that it was given alone.

        Operators that the pass inserts are marked with `made_by`, so that dumps can name it.

        Args:
            program: a valid program.

        Returns:
            A valid program.
        """


def made_by(op: Operator, pass_: Pass) -> Operator:
    """Returns the operator with its source saying which pass made it.

    The line of the user's program stays: give the operator the source of the one it serves.
    """
    return replace(op, source=replace(op.source, made_by=pass_.name))
