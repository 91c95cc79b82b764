"""Rendezvous by MPI, with deadlines that MPI's own collectives lack."""

import atexit
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from jaxfleet.cluster.rendezvous.exchanged_values import pack, unpack_at
from jaxfleet.cluster.rendezvous.protocol import GroupName, Poll, left_error
from jaxfleet.errors import PeerLostError, UnsupportedError

# The upper half of the tags that MPI guarantees: scripts that use MPI start from 0.
_FIRST_TAG, _TAGS = 1 << 14, 1 << 12
# mpirun drops what an aborted job has printed and it has not forwarded: once the last line.
_FORWARDED_S = 0.5
_GROUPS: tuple[GroupName, ...] = ("all", "trainer", "pserver")


def find_mpi() -> Any:
    """Imports mpi4py's MPI module, which starts MPI in this process."""
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
    """Lets an uncaught error end every process: under MPI the others would wait forever."""
    before = sys.excepthook
    if communicator.Get_size() == 1 or isinstance(before, _EndsAll):
        return
    sys.excepthook = _EndsAll(before, communicator)


@dataclass(frozen=True)
class _EndsAll:
    """Prints an error and aborts the job."""

    before: Callable[..., Any]
    communicator: Any

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.before(kind, error, trace)
        sys.stderr.flush()
        time.sleep(_FORWARDED_S)
        _abort(self.communicator)


class MpiRendezvous:
    """Gathers by point-to-point messages between every two processes.

    MPI's own collectives wait forever and do not name the missing process. Here each process sends
    its value to every other and polls for theirs, so the missing ones are known; gathered values
    are small, and jobs have tens of processes.
    """

    def __init__(self, communicator: Any, timeout_s: float) -> None:
        self._communicator, self._timeout_s = communicator, timeout_s
        self._groups: dict[GroupName, _Group] = {}
        self.add("all", range(communicator.Get_size()))

    def add(self, group: GroupName, ranks: Sequence[int]) -> None:
        """Declares the members of a group by their ranks in the communicator."""
        named = (f"{group} {at} (rank {rank})" for at, rank in enumerate(ranks))
        names = [f"rank {rank}" for rank in ranks] if group == "all" else list(named)
        by_rank = dict(zip(ranks, names, strict=True))
        self._groups[group] = _Group(group, self._communicator, by_rank)

    def gather(self, group: GroupName, value: Any, what: str) -> list[Any]:
        if find_mpi().Is_finalized():  # MPI would abort the process without naming the place
            raise left_error(what)
        return self._groups[group].gather(value, what, self._timeout_s)

    def close(self) -> None:
        """Does nothing: MPI ends when the process does."""


@dataclass
class _Group:
    """One group of the processes; see `MpiRendezvous`."""

    group: GroupName
    communicator: Any
    names: Mapping[int, str]  # by rank in the communicator
    calls: int = 0

    def gather(self, value: Any, what: str, timeout_s: float) -> list[Any]:
        self.calls += 1
        packed = self._swap(pack([what, value]), what, timeout_s)
        return unpack_at(what, packed, self.names.values(), self._where())

    def _swap(self, data: bytes, what: str, timeout_s: float) -> list[bytes]:
        all_, rank, poll, mpi = self.communicator, self._own_rank, Poll(timeout_s), find_mpi()
        others = [peer for peer in self.names if peer != rank]
        got = {rank: data}
        # A process that left before its messages were delivered would drop them.
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
                # The end of this process ends the job: MPI would wait forever for the lost one.
                atexit.register(_abort, all_)
                raise PeerLostError(f"{what}, {self._where()}: waited {timeout_s:g} s for {names}")
            poll.pause(partial("{} waits for {} ({})".format, self.names[rank], names, what))

    @property
    def _own_rank(self) -> int:
        return int(self.communicator.Get_rank())

    @property
    def _tag(self) -> int:
        """The tag of this call's messages, unique to the group: groups may share processes."""
        return _FIRST_TAG + _GROUPS.index(self.group) * _TAGS + self.calls % _TAGS

    def _where(self) -> str:
        return f"gathering {self.calls} of group {self.group}"


def _received(communicator: Any, peer: int, tag: int) -> bytes | None:
    """Returns a received message, or None: plain bytes, never unpickled."""
    mpi = find_mpi()
    status = mpi.Status()
    message = communicator.Improbe(source=peer, tag=tag, status=status)
    if message is None:
        return None
    data = bytearray(status.Get_count(mpi.BYTE))
    message.Recv([data, mpi.BYTE])
    return bytes(data)


def _abort(communicator: Any) -> None:
    if not find_mpi().Is_finalized():
        communicator.Abort(1)
