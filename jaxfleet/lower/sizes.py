"""Finds the number that every letter stands for, from the shapes of what is fed."""

from collections.abc import Iterable, Mapping, Sequence

from jaxfleet.errors import FeedError
from jaxfleet.ir import Dim, Size, Variable, evaluate


def bind_sizes(fed: Iterable[tuple[Variable, Sequence[int]]]) -> dict[str, int]:
    """Returns a number for every letter in the variables' shapes.

    Args:
        fed: variables with the shapes of their values.

    Raises:
        FeedError: a shape does not fit its variable; the error names both.
    """
    fed = list(fed)
    sizes: dict[str, int] = {}
    for variable, shape in fed:
        if len(shape) != len(variable.shape):
            raise _misfit(variable, shape)
        for size, number in zip(variable.shape, shape, strict=True):
            if (letter := _bare_letter(size)) is not None:
                sizes.setdefault(letter, number)
    for variable, shape in fed:
        if any(_differs(s, n, sizes) for s, n in zip(variable.shape, shape, strict=True)):
            raise _misfit(variable, shape, sizes)
    return sizes


def _bare_letter(size: Size) -> str | None:
    return str(size) if isinstance(size, Dim) and size.letters == {str(size)} else None


def _differs(size: Size, number: int, sizes: Mapping[str, int]) -> bool:
    return evaluate(size, sizes) != number


def _misfit(
    variable: Variable, shape: Sequence[int], sizes: Mapping[str, int] | None = None
) -> FeedError:
    found = ",".join(map(str, shape))
    given = "".join(f" with {letter}={number}" for letter, number in (sizes or {}).items())
    what = f"'{variable.name}' is fed an array of shape [{found}], but it is {variable.type}{given}"
    return FeedError(what, hint="feed what the program declares")
