"""Discovery of peers in a folder that may hold files of an earlier job.

Each process writes a hello file with a number drawn for this run and the numbers it has read in the
others' hellos. A process that finds its own number in a hello has proof that the writer runs now:
a file of an earlier job cannot contain it. Once all have found theirs, the numbers together name
the session.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxfleet.cluster.rendezvous.backoff import Poll
from jaxfleet.cluster.rendezvous.remote_path import Folder, FsPath
from jaxfleet.errors import ConnectError, PeerLostError, StrategyError


@dataclass(frozen=True)
class Hello:
    """Content of a hello file.

    Attributes:
        run: the number drawn by the process.
        members: the group as it sees it.
        seen: the others' numbers that it has read, by rank.
    """

    run: str
    members: Sequence[str]
    seen: Mapping[str, str] = field(default_factory=dict)


class FileDiscovery:
    """Lets the processes of a group find each other.

    Args:
        folder: visible to all of them.
        members: their names, in rank order.
        rank: of this process.
    """

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
    name = f".{path.name}.{os.getpid()}.part"
    if isinstance(path, FsPath):
        apart = path.with_name(name)
        apart.write_bytes(data)
        apart.replace(path)
        return
    unfinished = path.with_name(name)
    unfinished.write_bytes(data)
    unfinished.replace(path)


def _read_hello(path: Folder) -> Hello | None:
    try:
        said: Any = json.loads(path.read_bytes())
        return Hello(str(said["run"]), list(map(str, said["members"])), dict(said["seen"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
