"""Data of a program that a loader reads: `py_reader` and what goes with it."""

from collections.abc import Sequence
from typing import Any

from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.layers.refused import ListenAndServ as ListenAndServ
from jaxfleet.fluid.layers.refused import Recv as Recv
from jaxfleet.fluid.layers.refused import Send as Send
from jaxfleet.fluid.layers.tensors import declare_data
from jaxfleet.fluid.program import default_main_program
from jaxfleet.fluid.reader import PyReader
from jaxfleet.fluid.variable import Variable


def py_reader(
    capacity: int,
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[Any],
    lod_levels: Sequence[int] | None = None,
    name: str | None = None,
    use_double_buffer: bool = True,
) -> PyReader:
    """Declares data that a loader gives, batch by batch, between its `start` and `reset`.

    Args:
        capacity: how many batches may lie ready.
        shapes: of the variables that it gives; -1 is an axis that is known when it runs.
        dtypes: theirs.
        lod_levels: 1 where one is sequences of unequal lengths.
        name: what the variables are named for.
        use_double_buffer: taken.

    Raises:
        ProgramError: shapes and dtypes are not equally many.
    """
    levels = [0] * len(shapes) if lod_levels is None else list(lod_levels)
    if not len(shapes) == len(dtypes) == len(levels):
        what = f"py_reader: {len(shapes)} shapes, {len(dtypes)} dtypes and {len(levels)} lod_levels"
        raise mistake(what, "one of each for every variable")
    key = default_main_program().unique_name(name or "py_reader")
    found = [
        declare_data(f"{key}_data_{at}", list(shape), dtype, level)
        for at, (shape, dtype, level) in enumerate(zip(shapes, dtypes, levels, strict=True))
    ]
    return PyReader(found, capacity, use_double_buffer, iterable=False)


def create_py_reader_by_data(
    capacity: int, feed_list: Sequence[Variable], name: str | None = None,
    use_double_buffer: bool = True,
) -> PyReader:  # fmt: skip
    """Returns the loader of data that are declared already; see `py_reader`."""
    del name
    return PyReader(feed_list, capacity, use_double_buffer, iterable=False)


def read_file(reader: PyReader) -> Any:
    """Returns the variables that a loader gives; one by itself."""
    check_type(reader, "what read_file reads", PyReader, "what layers.py_reader returned")
    found = reader.variables
    return found[0] if len(found) == 1 else found


def double_buffer(reader: PyReader, place: Any = None, name: str | None = None) -> PyReader:
    """Returns the loader as it is: JAX moves what is fed while the step before runs."""
    del place, name
    return reader
