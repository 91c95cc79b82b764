"""Graph: a program as the original's C++ core passes it round."""

from jaxfleet.errors import WrongTypeError
from jaxfleet.fluid.program import Program


class Graph:
    """A program under another name: what reads and writes what is in the program already.

    Fluid's graph is made of a program and made a program again; its passes work on it between.
    Here passes work on the IR's programs (`jaxfleet.passes`), so a graph only holds its program.

    Args:
        program: it.

    Raises:
        TypeError: it is none.
    """

    def __init__(self, program: Program) -> None:
        if not isinstance(program, Program):
            raise WrongTypeError(f"a Graph is made of a Program, not of a {type(program).__name__}")
        self._program = program

    def to_program(self) -> Program:
        """Returns the program that it was made of."""
        return self._program
