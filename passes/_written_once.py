"""A program to be cut, with a temporary for each value."""

from jaxfleet.analysis.uses import OuterUses
from jaxfleet.analysis.written_once import used_inside, with_names_of_their_own, written_again
from jaxfleet.errors import PassError
from jaxfleet.ir import Program


def with_temporaries_written_once(program: Program) -> Program:
    """Returns a program in which no operator of block 0 writes a temporary that another wrote.

    Raises:
        PassError: a sub-block uses such a temporary, and knows it by one name.
    """
    uses, several = OuterUses(program), written_again(program)
    for op in program.root.ops:
        if found := sorted(used_inside(op, uses) & several):
            raise PassError(
                f"recompute: '{found[0]}' is written twice, and used in a sub-block", op=op
            )
    return with_names_of_their_own(program, several)
