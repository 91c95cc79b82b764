"""Rendezvous through a folder that all processes of a job share.

The folder may hold files of an earlier job. So each process first writes a hello file with a number
drawn for this run and the numbers it has read in the others' hellos. A process that finds its own
number in a hello has proof that the writer runs now: a file of an earlier job cannot contain it.
Once all have found theirs, the numbers together name the session.
"""

import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import quote

from jaxfleet.cluster.filesystems import Folder
from jaxfleet.cluster.rendezvous.exchanged_values import pack, unpack_at
from jaxfleet.cluster.rendezvous.protocol import GroupName, Poll, Roster, left_error
from jaxfleet.errors import ConnectError, JaxfleetError, PeerLostError, StrategyError

_LOOK_AT_HELLOS_S = 1.0


class FileRendezvous:
    """Gathers by files: each process writes its value and reads those of the others.

    Each group has a subfolder: `trainer`, `pserver` and `all`. `job` distinguishes jobs that share
    the folder.
    """

    def __init__(
        self, path: Folder, roster: Roster, *, connect_s: float, timeout_s: float, job: str = ""
    ) -> None:
        self._path, self._roster = path, roster
        self._prefix = quote(job, safe="")
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
            raise left_error(what)
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
        where = f"gathering {self._calls} in {self._folder}"
        values = unpack_at(what, self._read_all(what, where), self._members, where)
        # A process that has arrived here has read all earlier values, so they can go.
        self._file(self._rank, self._calls - 1).unlink(missing_ok=True)
        return values

    def _read_all(self, what: str, where: str) -> list[bytes]:
        given: dict[int, bytes] = {}
        poll, looked = Poll(self._timeout_s), time.monotonic()
        while True:
            # Listing the folder also refreshes its entries when the files are on another machine,
            # where a lookup of a missing name may be cached.
            there = {file.name for file in self._folder.iterdir()}
            for rank in range(len(self._members)):
                if rank not in given and (file := self._file(rank)).name in there:
                    given[rank] = file.read_bytes()
            if len(given) == len(self._members):
                return [given[rank] for rank in sorted(given)]
            if time.monotonic() - looked > _LOOK_AT_HELLOS_S or poll.is_over:
                self._hellos.check()
                looked = time.monotonic()
            gone = [name for rank, name in enumerate(self._members) if rank not in given]
            if poll.is_over:
                waited = f"waited {self._timeout_s:g} s for {', '.join(gone)}"
                raise PeerLostError(f"{what}, {where}: {waited}")
            waits = f"{self._members[self._rank]} waits for {', '.join(gone)} ({what}, {where})"
            poll.pause(waits.__str__)

    def _file(self, rank: int, call: int | None = None) -> Folder:
        number = self._calls if call is None else call
        return self._folder / f"{self._session}.{number}.{rank}"

    def _remove_old(self) -> None:
        """Removes files that an earlier run of this process left here."""
        for file in self._folder.glob(f"*.*.{self._rank}"):
            file.unlink(missing_ok=True)


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


@dataclass(frozen=True)
class Hello:
    """Content of a hello file."""

    run: str
    members: Sequence[str]
    seen: Mapping[str, str] = field(default_factory=dict)


class FileDiscovery:
    """Lets the processes of a group find each other."""

    def __init__(self, folder: Folder, members: Sequence[str], rank: int) -> None:
        self._folder, self._members, self._rank = folder, tuple(members), rank
        self._run = secrets.token_hex(8)
        self._found: dict[int, str] = {}
        self._has_said = False

    def find_all(self, connect_s: float) -> str:
        """Waits until all are present; returns the name of their session.

        Raises:
            ConnectError: a process never arrived.
            StrategyError: another process sees a different group, or claims this rank.
        """
        poll, said = Poll(connect_s), None
        while True:
            hellos = self._read()
            self._found = {rank: hello.run for rank, hello in hellos.items()}
            if said != self._found:
                self._say(self._found)
                said = dict(self._found)
            ready = {
                r for r, hello in hellos.items() if hello.seen.get(str(self._rank)) == self._run
            }
            self._check_members({rank: hellos[rank] for rank in ready})
            if len(ready) == len(self._members) - 1:
                return self._session()
            if poll.is_over:
                raise self._not_come(ready, connect_s)
            poll.pause(partial(self._waits, ready))

    def check(self) -> None:
        """Checks that no process has been replaced."""
        for rank, hello in self._read().items():
            if hello.run != self._found[rank]:
                what = f"{self._members[rank]} was started again, and this process was not"
                raise PeerLostError(f"{what} (in {self._folder})", hint="start all of them")

    def _read(self) -> dict[int, Hello]:
        read = {}
        for rank, name in enumerate(self._members):
            hello = _read_hello(self._file(rank))
            if rank == self._rank:
                if self._has_said and (hello is None or hello.run != self._run):
                    what = f"two processes say that they are {name}, in {self._folder}"
                    raise StrategyError(
                        what, hint="give each its own number, and each job a folder"
                    )
            elif hello is not None:
                read[rank] = hello
        return read

    def _say(self, seen: Mapping[int, str]) -> None:
        by_rank = {str(rank): run for rank, run in seen.items()}
        hello = {"run": self._run, "members": self._members, "seen": by_rank}
        self._has_said = True
        write_file(self._file(self._rank), json.dumps(hello).encode())

    def _check_members(self, hellos: Mapping[int, Hello]) -> None:
        for rank, hello in hellos.items():
            if tuple(hello.members) != self._members:
                what = f"{self._members[rank]} takes the group for {', '.join(hello.members)}"
                mine = f"this process takes it for {', '.join(self._members)}"
                raise StrategyError(f"{what}; {mine}", hint="give all the same endpoints")

    def _not_come(self, ready: set[int], connect_s: float) -> ConnectError:
        what = f"waited {connect_s:g} s in {self._folder} for {self._missing(ready)}"
        hint = "all processes of a job start together, and see the same folder"
        return ConnectError(what, hint=hint)

    def _missing(self, ready: set[int]) -> str:
        gone = [rank for rank in range(len(self._members)) if rank not in {*ready, self._rank}]
        return ", ".join(self._members[rank] for rank in gone)

    def _waits(self, ready: set[int]) -> str:
        return f"{self._members[self._rank]} waits in {self._folder} for {self._missing(ready)}"

    def _session(self) -> str:
        runs = sorted((self._found | {self._rank: self._run}).items())
        return hashlib.sha256(json.dumps(runs).encode()).hexdigest()[:12]

    def _file(self, rank: int) -> Folder:
        return self._folder / f"hello.{rank}"


def write_file(path: Folder, data: bytes) -> None:
    """Writes a file atomically."""
    unfinished: Any = path.with_name(f".{path.name}.{os.getpid()}.part")
    unfinished.write_bytes(data)
    unfinished.replace(path)


def _read_hello(path: Folder) -> Hello | None:
    try:
        said: Any = json.loads(path.read_bytes())
        return Hello(str(said["run"]), list(map(str, said["members"])), dict(said["seen"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
