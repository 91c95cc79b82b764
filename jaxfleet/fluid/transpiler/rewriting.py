"""Rewrites a fluid program by passes: into the IR, through a pipeline, and back."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxfleet.analysis.rules import meaning_rules
from jaxfleet.errors import PassError
from jaxfleet.fluid.from_ir import write_back
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.to_ir import ir_program
from jaxfleet.ir import Program as IrProgram
from jaxfleet.ops.frames import line_of_caller
from jaxfleet.pipeline import Pass, run_pipeline


@dataclass(frozen=True)
class Rewritten:
    """What passes made of a program, before it is written back.

    Attributes:
        program: the program, which is what it was.
        made: what the passes made of it.
    """

    program: Program
    made: IrProgram

    @classmethod
    def of(cls, program: Program, passes: Sequence[Pass]) -> "Rewritten":
        """Runs passes on a program.

        Raises:
            PassError: a pass cannot run on it; a note says the line that asked for it.
        """
        try:
            return cls(program, run_pipeline(ir_program(program), passes, rules=meaning_rules))
        except PassError as error:
            line = line_of_caller()
            if line is not None:
                error.add_note(f"  {line.where()}")
            raise

    def write_back(self) -> None:
        """Makes the program what the passes made; what it was is its `_origin_program`."""
        origin = self.program.clone()
        write_back(self.program, self.made)
        self.program._origin_program = origin
