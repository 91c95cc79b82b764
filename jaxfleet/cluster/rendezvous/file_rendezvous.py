"""Rendezvous through a folder that all processes of a job share."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from jaxfleet.cluster.rendezvous.backoff import Poll
from jaxfleet.cluster.rendezvous.exchanged_values import pack, unpack
from jaxfleet.cluster.rendezvous.file_discovery import FileDiscovery, write_file
from jaxfleet.cluster.rendezvous.protocol import GroupName, Roster
from jaxfleet.cluster.rendezvous.remote_path import Folder
from jaxfleet.errors import ClosedError, JaxfleetError, PeerLostError, ProgramError, StrategyError

_LOOK_AT_HELLOS_S = 1.0


class FileRendezvous:
    """Gathers by files: each process writes its value and reads those of the others.

    Args:
        path: the folder; each group has a subfolder: `trainer`, `pserver` and `all`.
        roster: the processes.
        connect_s: the longest wait for all to arrive.
        timeout_s: the longest wait at one gather.
        prefix: distinguishes jobs that share the folder.
    """

    def __init__(
        self,
        path: Folder,
        roster: Roster,
        *,
        connect_s: float,
        timeout_s: float,
        prefix: str = "",
    ) -> None:
        self._path, self._roster, self._prefix = path, roster, prefix
        self._connect_s, self._timeout_s = connect_s, timeout_s
        self._groups: dict[GroupName, _Group] = {}
        self._is_closed = False

    def join(self) -> None:
        """Waits until all processes are present.

        Raises:
            ConnectError: a process never arrived.
            StrategyError: a process has a different view of the job, or the folder cannot be
                created.
        """
        with _usable(self._path, "meeting"):
            for group in ("all", self._roster.group):
                self._group(group)

    def gather(self, group: GroupName, value: Any, what: str) -> list[Any]:
        if self._is_closed:
            hint = "barriers and sums of workers come before fleet.stop_worker()"
            raise ClosedError(f"{what}: this process has left the others", hint=hint)
        with _usable(self._path, what):
            return self._group(group).gather(value, what)

    def close(self) -> None:
        """Leaves; files that the others may still have to read stay."""
        self._groups, self._is_closed = {}, True

    def _group(self, name: GroupName) -> "_Group":
        if name not in self._groups:
            members, rank = self._roster.members(name), self._roster.rank_in(name)
            folder = _made(self._path / name / self._prefix)
            self._groups[name] = _Group(
                folder, members, rank, connect_s=self._connect_s, timeout_s=self._timeout_s
            )
        return self._groups[name]


class _Group:
    """One group of the processes; see `FileRendezvous`."""

    def __init__(
        self,
        folder: Folder,
        members: Sequence[str],
        rank: int,
        *,
        connect_s: float,
        timeout_s: float,
    ) -> None:
        self._folder, self._members, self._rank = folder, members, rank
        self._timeout_s, self._calls = timeout_s, 0
        self._remove_old()
        self._hellos = FileDiscovery(folder, members, rank)
        self._session = self._hellos.find_all(connect_s)

    def gather(self, value: Any, what: str) -> list[Any]:
        self._calls += 1
        write_file(self._file(self._rank), pack([what, value]))
        given = self._read_all(what)
        for name, (other, _) in zip(self._members, given, strict=True):
            if other != what:
                message = f"{name} is at {other}, and this process at {what}"
                where = f"gathering {self._calls} in {self._folder}"
                hint = "all processes of a group gather in the same order"
                raise ProgramError(f"{message}: {where}", hint=hint)
        # A process that has arrived here has read all earlier values, so they can go.
        self._file(self._rank, self._calls - 1).unlink(missing_ok=True)
        return [each for _, each in given]

    def _read_all(self, what: str) -> list[Any]:
        given: dict[int, Any] = {}
        poll, looked = Poll(self._timeout_s), time.monotonic()
        while True:
            # Listing the folder also refreshes its entries when the files are on another machine,
            # where a lookup of a missing name may be cached.
            there = {file.name for file in self._folder.iterdir()}
            for rank in range(len(self._members)):
                if rank not in given and (file := self._file(rank)).name in there:
                    given[rank] = unpack(file.read_bytes())
            if len(given) == len(self._members):
                return [given[rank] for rank in sorted(given)]
            if time.monotonic() - looked > _LOOK_AT_HELLOS_S or poll.is_over:
                self._hellos.check()
                looked = time.monotonic()
            where = f"{what}, gathering {self._calls} in {self._folder}"
            gone = [name for rank, name in enumerate(self._members) if rank not in given]
            if poll.is_over:
                waited = f"waited {self._timeout_s:g} s for {', '.join(gone)}"
                raise PeerLostError(f"{where}: {waited}")
            poll.pause(partial(_waits, self._members[self._rank], gone, where))

    def _file(self, rank: int, call: int | None = None) -> Folder:
        number = self._calls if call is None else call
        return self._folder / f"{self._session}.{number}.{rank}"

    def _remove_old(self) -> None:
        """Removes files that an earlier run of this process left here."""
        for file in self._folder.glob(f"*.*.{self._rank}"):
            file.unlink(missing_ok=True)


def _waits(name: str, gone: Sequence[str], where: str) -> str:
    return f"{name} waits for {', '.join(gone)} ({where})"


@contextmanager
def _usable(folder: Folder, what: str) -> Iterator[None]:
    """Names the folder in errors of reading or writing it."""
    try:
        yield
    except OSError as error:
        if isinstance(error, JaxfleetError):
            raise
        lost = f"{what}: folder {folder}, in which processes meet, is lost: {error}"
        raise PeerLostError(
            lost, hint="it stays, and all may write to it, as long as the job runs"
        ) from error


def _made(folder: Folder) -> Folder:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"folder {folder}, in which processes are to meet, cannot be made: {error.strerror}"
        raise StrategyError(what, hint="give a folder that every process may write to") from error
    return folder
