"""Reading of files in threads, by blocks of whole lines, in the files' order.

Each thread reads one file, a few blocks ahead of the consumer. Samples come in the order of the
file list regardless of the threads' speed, so two runs over the same files are equal.
"""

import queue
import shlex
import subprocess
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import IO

from jaxfleet.errors import FeedError, ProgramError
from jaxfleet.fluid.argument_checks import mistake
from jaxfleet.fluid.dataset.multi_slot import parse, parse_named
from jaxfleet.fluid.dataset.slots import Samples, Slot

BLOCK = 1 << 20  # bytes that are read and parsed at once
_SHELL = {"|", "||", "&", "&&", ";", "<", ">", ">>", "2>", "2>&1"}
_LAST_WORDS = 2000  # bytes of a command's stderr in an error
_END_S = 10.0  # the time for a command to end after its output
AS_IT_IS = ("cat",)

Blocks = Generator[tuple[bytes, int]]  # whole lines, and the number of the first


def split_command(command: str) -> tuple[str, ...]:
    """Splits a command into words, to be run without a shell; ProgramError if it needs one."""
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise mistake(f"the command {command!r} cannot be read: {error}") from error
    if not words:
        raise mistake("the command is empty", "'cat' reads a file as it is")
    if shells := _SHELL.intersection(words):
        what = f"the command {command!r} has {min(shells)!r}, and no shell reads it"
        raise mistake(what, "put it into a script, and name that")
    return words


def blocks(path: str, command: tuple[str, ...], is_stopped: Callable[[], bool]) -> Blocks:
    """Yields a file, piped through a command, in blocks of whole lines.

    FeedError if it cannot be read, or the command fails. `is_stopped` is whether the consumer has
    stopped.
    """
    try:
        with open(path, "rb") as file:  # noqa: PTH123  # a path as given by the script
            if command == AS_IT_IS:
                yield from _whole_lines(file)
                return
            with _piped(path, file, command, is_stopped) as output:
                yield from _whole_lines(output)
    except OSError as error:
        raise FeedError(f"'{path}' cannot be read: {error}", hint="see set_filelist") from error


def _whole_lines(file: IO[bytes]) -> Blocks:
    rest: list[bytes] = []  # of an incomplete line; joined once, however long it is
    line = 1
    while data := file.read(BLOCK):
        end = data.rfind(b"\n") + 1
        if end:
            text, rest = b"".join([*rest, data[:end]]), []
            yield text, line
            line += text.count(b"\n")
        if data[end:]:
            rest.append(data[end:])
    if rest:
        yield b"".join(rest), line


@contextmanager
def _piped(
    path: str, file: IO[bytes], command: tuple[str, ...], is_stopped: Callable[[], bool]
) -> Iterator[IO[bytes]]:
    """Runs a command with a file as its input, and yields its output."""
    with tempfile.TemporaryFile() as complaints:
        try:
            run = subprocess.Popen(  # noqa: S603  # the user's own command, split into words
                command, stdin=file, stdout=subprocess.PIPE, stderr=complaints
            )
        except OSError as error:
            what = f"the command {shlex.join(command)!r} cannot be run: {error}"
            raise ProgramError(what, hint="see set_pipe_command") from error
        assert run.stdout is not None
        is_read = False
        try:
            yield run.stdout
            is_read = True
        finally:
            run.stdout.close()
            status = _ended(run, is_read=is_read)
        if status and not is_stopped():
            complaints.seek(0)
            said = complaints.read()[-_LAST_WORDS:].decode("utf-8", "replace").strip()
            what = f"the command {shlex.join(command)!r} ended with {status} on '{path}'"
            raise FeedError(f"{what}\n{said}" if said else what, hint="see set_pipe_command")


def _ended(run: subprocess.Popen[bytes], *, is_read: bool) -> int:
    """Waits for a command after its output, or terminates one whose output is not read."""
    if not is_read:
        run.terminate()
    try:
        return run.wait(_END_S)
    except subprocess.TimeoutExpired:
        run.kill()
        return run.wait()


_AHEAD = 4  # blocks of a file read ahead
_LOOK_S = 0.1  # interval at which a waiting thread checks whether it was stopped

_Item = Samples | Exception | None  # some samples, an exception, or the end


class _File:
    """One file of the list, and its queue of samples."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.read: queue.Queue[_Item] = queue.Queue(_AHEAD)


def read_files(
    paths: Sequence[str],
    slots: Sequence[Slot],
    command: tuple[str, ...],
    threads: int,
    groups: int = 0,
) -> Iterator[Samples]:
    """Yields the samples of files in chunks, in order.

    `threads` files are read at once, each piped through a command. `groups` is the number of
    counted words before the slots: an id, a content.
    """
    files, stopped = [_File(path) for path in paths], threading.Event()
    waiting: queue.SimpleQueue[_File] = queue.SimpleQueue()
    for file in files:
        waiting.put(file)
    readers = [
        threading.Thread(target=_read, args=(waiting, slots, command, groups, stopped), daemon=True)
        for _ in range(min(threads, len(files)))
    ]
    for reader in readers:
        reader.start()
    try:
        for file in files:
            while (item := file.read.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
    finally:
        stopped.set()
        for reader in readers:
            reader.join()


def _read(
    waiting: "queue.SimpleQueue[_File]",
    slots: Sequence[Slot],
    command: tuple[str, ...],
    groups: int,
    stopped: threading.Event,
) -> None:
    """Reads one file after another until the list ends or the consumer stops."""
    while not stopped.is_set():
        try:
            file = waiting.get_nowait()
        except queue.Empty:
            return
        end: _Item = None
        found = blocks(file.path, command, stopped.is_set)
        try:
            for text, line in found:
                if not _put(file, _parsed(text, slots, file.path, line, groups), stopped):
                    break
        except Exception as error:  # noqa: BLE001  # raised again in the consumer
            end = error
        finally:
            found.close()
        _put(file, end, stopped)


def _parsed(text: bytes, slots: Sequence[Slot], path: str, line: int, groups: int) -> Samples:
    if groups:
        return parse_named(text, slots, path, line, groups)
    return parse(text, slots, path, line)


def _put(file: _File, item: _Item, stopped: threading.Event) -> bool:
    """Waits for room in the queue; False if the consumer stopped first."""
    while not stopped.is_set():
        try:
            file.read.put(item, timeout=_LOOK_S)
            return True
        except queue.Full:
            continue
    return False


def batches(parts: Iterator[Samples], size: int) -> Iterator[Samples]:
    """Yields samples in batches; the last one has the remainder."""
    held: list[Samples] = []
    count = 0
    for part in parts:
        held.append(part)
        count += len(part)
        if count < size:
            continue
        whole = Samples.joined(held)
        full = count - count % size
        for start in range(0, full, size):
            yield whole.part(start, start + size)
        held, count = ([whole.part(full, count)] if count > full else []), count - full
    if count:
        yield Samples.joined(held)
