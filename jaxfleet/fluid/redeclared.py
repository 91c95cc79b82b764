"""A variable that is declared again must be what it was."""

from collections.abc import Collection

from jaxfleet.fluid.checks import mistake
from jaxfleet.fluid.variable import Variable

_COMPARED = ("type", "shape", "dtype", "lod_level", "persistable")


def check_same(known: Variable, made: Variable, said: Collection[str]) -> None:
    """Compares a variable with what is said of it now.

    Args:
        known: as it was declared before.
        made: as it is declared now.
        said: the names of what is said now; the rest is not compared.

    Raises:
        ValueError: they differ.
    """
    for what in _COMPARED:
        if what not in said or (what == "shape" and None in (known.sizes, made.sizes)):
            continue
        before, now = getattr(known, what), getattr(made, what)
        if before != now:
            text = f"variable '{known.name}' has {what} {before!r}, and is declared again with"
            raise mistake(f"{text} {now!r}", "take another name, or declare it the same")
