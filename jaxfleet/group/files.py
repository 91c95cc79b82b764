"""Division of files among the processes that train."""

from collections.abc import Sequence

from jaxfleet.errors import StrategyError
from jaxfleet.group import place


def split_files(
    files: Sequence[str], *, rank: int | None = None, size: int | None = None
) -> list[str]:
    """Returns this process's part of some files: contiguous, and the first ranks have one more.

    Args:
        files: the same list on every process.
        rank: which process; `jf.rank()` unless given.
        size: the number of processes; `jf.size()` unless given.

    Raises:
        StrategyError: there is no such process; a server of a job has no files.
    """
    if rank is None and size is None and place.is_server():
        return []  # the script of a job may run on servers too; they train on nothing
    count = place.size() if size is None else size
    which = place.rank() if rank is None else rank
    if not 0 <= which < count:
        raise StrategyError(f"split_files: there is no process {which} among {count}")
    each, more = divmod(len(files), count)
    start = which * each + min(which, more)
    return list(files[start : start + each + (which < more)])
