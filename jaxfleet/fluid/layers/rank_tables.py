"""Parts of hand-written loops over sequences, which `DynamicRNN` replaces; all are refused."""

from typing import Any, NoReturn

from jaxfleet.errors import UnsupportedError
from jaxfleet.ops.user_frames import line_of_caller


def lod_rank_table(x: Any, level: int = 0) -> NoReturn:
    """Unsupported: the order of sequences by length. Raises NotImplementedError."""
    del x, level
    raise _refused("lod_rank_table")


def max_sequence_len(rank_table: Any) -> NoReturn:
    """Unsupported: the length of the longest sequence. Raises NotImplementedError."""
    del rank_table
    raise _refused("max_sequence_len")


def lod_tensor_to_array(x: Any, table: Any) -> NoReturn:
    """Unsupported: an array of the rows of each time step. Raises NotImplementedError."""
    del x, table
    raise _refused("lod_tensor_to_array")


def array_to_lod_tensor(x: Any, table: Any) -> NoReturn:
    """Unsupported: sequences of an array of time steps. Raises NotImplementedError."""
    del x, table
    raise _refused("array_to_lod_tensor")


def shrink_memory(x: Any, i: Any, table: Any) -> NoReturn:
    """Unsupported: the state of sequences that have not ended. Raises NotImplementedError."""
    del x, i, table
    raise _refused("shrink_memory")


def reorder_lod_tensor_by_rank(x: Any, rank_table: Any) -> NoReturn:
    """Unsupported: sequences in the order of their lengths. Raises NotImplementedError."""
    del x, rank_table
    raise _refused("reorder_lod_tensor_by_rank")


def _refused(name: str) -> UnsupportedError:
    what = f"{name}: sequences are not sorted by length here"
    hint = (
        "write the loop with layers.DynamicRNN, which takes sequences in their order: step_input, "
        "memory, update_memory and output instead of arrays and tables"
    )
    return UnsupportedError(what, source=line_of_caller(), hint=hint)
