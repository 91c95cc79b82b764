"""Rewrites a fluid program by passes: into the IR, through a pipeline, and back."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxfleet.errors import PassError
from jaxfleet.fluid.from_ir import write_back
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.to_ir import ir_program
from jaxfleet.ir import Program as IrProgram
from jaxfleet.ops.frames import line_of_caller
from jaxfleet.pipeline import Pass
from jaxfleet.runtime.transpile import transpile


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
    def of(cls, program: Program, passes: Sequence[Pass], *, name: str = "main") -> "Rewritten":
        """Runs passes on a program; dumps what each does where the environment asks for dumps.

        Args:
            program: it.
            passes: in order.
            name: what it is called in dumps.

        Raises:
            PassError: a pass cannot run on it; a note says the line that asked for it.
        """
        try:
            return cls(program, transpile(ir_program(program, name=name), passes, dump_dir=None)[0])
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
