"""A meeting by MPI, with deadlines that MPI's own collectives do not have."""

import atexit
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from jaxfleet.errors import ClosedError, PeerLostError, ProgramError, UnsupportedError
from jaxfleet.fleet.meeting.meeting import GroupName
from jaxfleet.fleet.meeting.polling import Poll
from jaxfleet.fleet.meeting.values import pack, unpack

# Of the tags that MPI promises, the upper half: scripts that use MPI themselves begin from 0.
_FIRST_TAG, _TAGS = 1 << 14, 1 << 12
_GROUPS: tuple[GroupName, ...] = ("all", "trainer", "pserver")


def find_mpi() -> Any:
    """Returns mpi4py's module, which starts MPI in this process.

    Raises:
        UnsupportedError: there is no mpi4py, or no MPI.
    """
    try:
        from mpi4py import MPI  # noqa: PLC0415  # an extra; and to import it starts MPI
    except ImportError as error:
        what = f"mpi4py cannot be imported: {error}"
        hint = "pip install 'jaxfleet[mpi]'"
        raise UnsupportedError(what, hint=hint) from error
    except RuntimeError as error:
        what = f"mpi4py finds no MPI: {str(error).partition(chr(10))[0]}"
        hint = "load the cluster's MPI, or pip install mpich"
        raise UnsupportedError(what, hint=hint) from error
    return MPI


def end_all_on_error(communicator: Any) -> None:
    """Lets an error that nobody catches end every process: MPI would have them wait for ever."""
    before = sys.excepthook
    if communicator.Get_size() == 1 or isinstance(before, _EndsAll):
        return
    sys.excepthook = _EndsAll(before, communicator)


@dataclass(frozen=True)
class _EndsAll:
    """Shows an error, and ends the job."""

    before: Callable[..., Any]
    communicator: Any

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.before(kind, error, trace)
        sys.stderr.flush()
        _abort(self.communicator)


class MpiMeeting:
    """Lets processes gather by messages between every two of them.

    MPI's own collectives wait for ever, and do not say for whom. Here each sends what it gives to
    every other and looks for what they sent, so that the missing ones are known; what is gathered
    is small, and jobs have tens of processes.

    Args:
        communicator: of all processes.
        timeout_s: how long all may take to come to one gathering.
    """

    def __init__(self, communicator: Any, timeout_s: float) -> None:
        self._communicator, self._timeout_s = communicator, timeout_s
        self._groups: dict[GroupName, _Group] = {}
        self.add("all", range(communicator.Get_size()))

    def add(self, group: GroupName, ranks: Sequence[int]) -> None:
        """Says who belongs to a group of this process.

        Args:
            group: its name.
            ranks: which of all they are.
        """
        named = (f"{group} {at} (rank {rank})" for at, rank in enumerate(ranks))
        names = [f"rank {rank}" for rank in ranks] if group == "all" else list(named)
        by_rank = dict(zip(ranks, names, strict=True))
        self._groups[group] = _Group(group, self._communicator, by_rank)

    def gather(self, group: GroupName, value: Any, what: str) -> list[Any]:
        """Returns what every process of a group gave; see `Meeting`.

        Raises:
            ClosedError: this process has left.
        """
        if find_mpi().Is_finalized():  # MPI would end the process, without a word of where
            hint = "barriers and sums of workers come before fleet.stop_worker()"
            raise ClosedError(f"{what}: this process has left the others", hint=hint)
        return self._groups[group].gather(value, what, self._timeout_s)

    def close(self) -> None:
        """Does nothing: MPI ends when the process does."""


@dataclass
class _Group:
    """Is one group of the processes; see `MpiMeeting`."""

    group: GroupName
    communicator: Any
    names: Mapping[int, str]  # by rank among all
    calls: int = 0

    def gather(self, value: Any, what: str, timeout_s: float) -> list[Any]:
        self.calls += 1
        given = [unpack(each) for each in self._swap(pack([what, value]), what, timeout_s)]
        for name, (other, _) in zip(self.names.values(), given, strict=True):
            if other != what:
                message = f"{name} is at {other}, and this process at {what}"
                hint = "all processes of a group gather in the same order"
                raise ProgramError(f"{message}: {self._where()}", hint=hint)
        return [each for _, each in given]

    def _swap(self, data: bytes, what: str, timeout_s: float) -> list[bytes]:
        """Returns what every process sent, in the group's order."""
        all_, rank, poll, mpi = self.communicator, self._own_rank, Poll(timeout_s), find_mpi()
        others = [peer for peer in self.names if peer != rank]
        got = {rank: data}
        # A process that left before its messages were read would take them with it.
        unread = {peer: all_.Isend([data, mpi.BYTE], dest=peer, tag=self._tag) for peer in others}
        while True:
            for peer in others:
                found = None if peer in got else _received(all_, peer, self._tag)
                if found is not None:
                    got[peer] = found
                if peer in unread and unread[peer].Test():
                    del unread[peer]
            if len(got) == len(self.names) and not unread:
                return [got[peer] for peer in self.names]
            late = [peer for peer in others if peer not in got] or list(unread)
            names = ", ".join(self.names[peer] for peer in late)
            if poll.is_over:
                _end_with_error(all_)
                raise PeerLostError(f"{what}, {self._where()}: waited {timeout_s:g} s for {names}")
            poll.pause(partial("{} waits for {} ({})".format, self.names[rank], names, what))

    @property
    def _own_rank(self) -> int:
        return int(self.communicator.Get_rank())

    @property
    def _tag(self) -> int:
        """The tag of this call's messages: no other group's, whose processes may be the same."""
        return _FIRST_TAG + _GROUPS.index(self.group) * _TAGS + self.calls % _TAGS

    def _where(self) -> str:
        return f"gathering {self.calls} of group {self.group}"


def _received(communicator: Any, peer: int, tag: int) -> bytes | None:
    """Returns a message that has come, None where none has: bytes, which nothing unpickles."""
    mpi = find_mpi()
    status = mpi.Status()
    message = communicator.Improbe(source=peer, tag=tag, status=status)
    if message is None:
        return None
    data = bytearray(status.Get_count(mpi.BYTE))
    message.Recv([data, mpi.BYTE])
    return bytes(data)


def _end_with_error(communicator: Any) -> None:
    """Lets this process end the job when it ends: MPI would wait for ever for who is lost."""
    atexit.register(_abort, communicator)


def _abort(communicator: Any) -> None:
    if not find_mpi().Is_finalized():
        communicator.Abort(1)
