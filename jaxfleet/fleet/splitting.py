"""Shares files out among workers."""

from collections.abc import Sequence

from jaxfleet.errors import WrongTypeError


def split_files(files: Sequence[str], worker: int, workers: int) -> list[str]:
    """Returns the files of one worker: a contiguous block; the first workers have one more.

    >>> [split_files(["a", "b", "c", "d", "e"], worker, 2) for worker in range(2)]
    [['a', 'b', 'c'], ['d', 'e']]

    Args:
        files: all of them, in the same order on every worker.
        worker: whose are wanted, from 0.
        workers: how many there are.

    Raises:
        WrongTypeError: the files are no list.
    """
    if not isinstance(files, list | tuple):
        what = "files should be a list of file need to be read."
        hint = f"a list of paths, not {type(files).__name__}"
        raise WrongTypeError(what, hint=hint)
    least, more = divmod(len(files), workers)
    begin = worker * least + min(worker, more)
    return list(files[begin : begin + least + (worker < more)])
