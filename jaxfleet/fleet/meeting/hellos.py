"""How processes find each other in a folder, although an earlier job left files there.

Each writes a hello with a number drawn for this run, and with the numbers that it has read in the
others' hellos. Who finds its own number in a hello knows that its writer runs now: a file of an
earlier job cannot have it. When all have found theirs, the numbers together name the session.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxfleet.errors import ConnectError, PeerLostError, StrategyError
from jaxfleet.fleet.meeting.fs_folder import Folder, FsPath
from jaxfleet.fleet.meeting.polling import Poll


@dataclass(frozen=True)
class Hello:
    """Holds what a process says of itself.

    Attributes:
        run: the number that it drew.
        members: who it takes the group for.
        seen: the numbers of others that it has read, by rank.
    """

    run: str
    members: Sequence[str]
    seen: Mapping[str, str] = field(default_factory=dict)


class Hellos:
    """Lets the processes of a group find each other.

    Args:
        folder: where they meet; all of them see it.
        members: their names, in their order.
        rank: which of them this one is.
    """

    def __init__(self, folder: Folder, members: Sequence[str], rank: int) -> None:
        self._folder, self._members, self._rank = folder, tuple(members), rank
        self._run = secrets.token_hex(8)
        self._found: dict[int, str] = {}
        self._has_said = False

    def find_all(self, connect_s: float) -> str:
        """Waits until all are there, and returns the name of their session.

        Raises:
            ConnectError: somebody never came.
            StrategyError: another takes the group for a different one, or this one for itself.
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
        """Checks that all are still those who came.

        Raises:
            PeerLostError: somebody has begun anew.
            StrategyError: another process says that it is this one.
        """
        for rank, hello in self._read().items():
            if hello.run != self._found[rank]:
                what = f"{self._members[rank]} was started again, and this process was not"
                raise PeerLostError(f"{what} (in {self._folder})", hint="start all of them")

    def _read(self) -> dict[int, Hello]:
        """Returns the others' hellos that are there."""
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
    """Writes a file so that whoever sees it sees all of it."""
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
    """Returns what a file says; None where there is none, or none that a process wrote whole."""
    try:
        said: Any = json.loads(path.read_bytes())
        return Hello(str(said["run"]), list(map(str, said["members"])), dict(said["seen"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
