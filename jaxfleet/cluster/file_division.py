"""Division of files among the processes that train."""

from collections.abc import Sequence

from jaxfleet.cluster import ranks
from jaxfleet.errors import StrategyError


def split_files(
    files: Sequence[str], *, rank: int | None = None, size: int | None = None
) -> list[str]:
    """Returns this process's share of a list of files: contiguous; the first ranks get one more.

    Args:
        files: the same list on every process.
        rank: which process; `jf.rank()` by default.
        size: the number of processes; `jf.size()` by default.

    Raises:
        StrategyError: the rank is out of range, or this process is a server.
    """
    if rank is None and size is None and ranks.is_server():
        return []  # the script may run on servers too, which do not train
    count = ranks.size() if size is None else size
    which = ranks.rank() if rank is None else rank
    if not 0 <= which < count:
        raise StrategyError(f"split_files: there is no process {which} among {count}")
    each, more = divmod(len(files), count)
    start = which * each + min(which, more)
    return list(files[start : start + each + (which < more)])
