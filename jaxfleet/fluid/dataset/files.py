"""Files as blocks of whole lines, read as they are or through a command."""

import shlex
import subprocess
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import IO

from jaxfleet.errors import FeedError, ProgramError
from jaxfleet.fluid.checks import mistake

BLOCK = 1 << 20  # bytes that are read, and become samples, at once
_SHELL = {"|", "||", "&", "&&", ";", "<", ">", ">>", "2>", "2>&1"}
_LAST_WORDS = 2000  # bytes of a command's complaints that an error shows
_END_S = 10.0  # that a command has to end after its output has
AS_IT_IS = ("cat",)

Blocks = Generator[tuple[bytes, int]]  # whole lines, and the number of the first


def words_of(command: str) -> tuple[str, ...]:
    """Returns a command as the list of its words, which is run as it is: no shell reads it.

    Raises:
        ProgramError: it has none, or words that only a shell understands.
    """
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
    """Yields a file in blocks of whole lines.

    Args:
        path: its.
        command: what it is piped through.
        is_stopped: tells that nobody wants the rest.

    Raises:
        FeedError: it cannot be read, or the command fails.
    """
    try:
        with open(path, "rb") as file:  # noqa: PTH123  # a path as the script gives it
            if command == AS_IT_IS:
                yield from _whole_lines(file)
                return
            with _piped(path, file, command, is_stopped) as output:
                yield from _whole_lines(output)
    except OSError as error:
        raise FeedError(f"'{path}' cannot be read: {error}", hint="see set_filelist") from error


def _whole_lines(file: IO[bytes]) -> Blocks:
    rest: list[bytes] = []  # of a line whose end was not read yet; joined once, however long it is
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
    """Runs a command with a file as its input, and gives its output."""
    with tempfile.TemporaryFile() as complaints:
        try:
            run = subprocess.Popen(  # noqa: S603  # the user's own command, by its words
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
    """Waits for a command whose output has ended, and ends one whose output nobody reads."""
    if not is_read:
        run.terminate()
    try:
        return run.wait(_END_S)
    except subprocess.TimeoutExpired:
        run.kill()
        return run.wait()
