"""Shares files out among the processes."""

from collections.abc import Sequence

from jaxfleet.errors import StrategyError
from jaxfleet.group.joining import joined


def split_files(
    files: Sequence[str], *, rank: int | None = None, size: int | None = None
) -> list[str]:
    """Returns this process's part of some files: contiguous, and the first ranks have one more.

    Args:
        files: the same list on every process.
        rank: which process; this one, unless given.
        size: how many there are; those of the group, unless given.

    Raises:
        StrategyError: there is no such process.
    """
    here = joined()
    count = size if size is not None else here.size if here else 1
    which = rank if rank is not None else here.rank if here else 0
    if not 0 <= which < count:
        raise StrategyError(f"split_files: there is no process {which} among {count}")
    each, more = divmod(len(files), count)
    start = which * each + min(which, more)
    return list(files[start : start + each + (which < more)])
