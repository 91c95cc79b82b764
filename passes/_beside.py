"""What passes share that keep variables beside the user's state."""

from collections.abc import Iterable
from dataclasses import replace

from jaxfleet.ir import Attr, Program, Variable


def with_beside(
    program: Program, kept: Iterable[tuple[Variable, str | int | float]], **attrs: tuple[str, ...]
) -> Program:
    """Returns a program with more variables that a step holds beside its state.

    Args:
        program: it.
        kept: the variables, and what each begins with: a number, or a variable of the state.
        attrs: names to add to attributes that are lists of names, such as `sums`.
    """
    kept = list(kept)
    variables = {**program.variables, **{variable.name: variable for variable, _ in kept}}
    pairs = tuple((variable.name, begin) for variable, begin in kept)
    more: dict[str, Attr] = {
        name: (*_listed(program, name), *names) for name, names in attrs.items() if names
    }
    said = program.attrs.updated(beside=(*_listed(program, "beside"), *pairs), **more)
    return replace(program, variables=variables, attrs=said)


def _listed(program: Program, attr: str) -> tuple[Attr, ...]:
    found = program.attrs.get(attr, ())
    assert isinstance(found, tuple)
    return found
