"""The letters of a program, where no sizes are at hand."""

from collections.abc import Mapping

from jaxfleet.ir import Dim, Program


def sizes_of_letters(program: Program, rows: int) -> Mapping[str, int]:
    """Returns the same number for every letter in the shapes of a program."""
    scopes = (program.variables, *(block.variables for block in program.blocks))
    sizes = (size for scope in scopes for v in scope.values() for size in v.shape)
    letters = {letter for size in sizes if isinstance(size, Dim) for letter in size.letters}
    return dict.fromkeys(letters, rows)
