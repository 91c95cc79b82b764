"""Which values nothing reads any more, while a step runs in parts."""

from collections.abc import Collection, Iterable, Sequence

from jaxfleet.ir import Kind, Program


def drops_of(
    program: Program, uses: Sequence[Iterable[str]], kept: Collection[str]
) -> list[tuple[str, ...]]:
    """Returns, for each part of a step, the temporaries that nothing reads after it.

    Args:
        program: the step's.
        uses: for each part, the names that it reads or writes.
        kept: variables that are read when the step is over.
    """
    last = {name: place for place, names in enumerate(uses) for name in names}
    found: list[list[str]] = [[] for _ in uses]
    for name, place in last.items():
        if name not in kept and program.lookup(name).kind is Kind.TEMP:
            found[place].append(name)
    return [tuple(names) for names in found]
