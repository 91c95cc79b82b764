"""The folders below which trainers may have a server write and read checkpoints."""

from dataclasses import dataclass
from pathlib import Path

from jaxfleet.ps.messages import Kind, Message
from jaxfleet.ps.server.desk import RefusedError

_LONGEST = 300  # characters of a path that an error repeats


@dataclass(frozen=True)
class SaveFolders:
    """Checks the paths that messages name.

    The folders come from the server's own configuration, never from a peer. Symbolic links are
    resolved before the comparison.

    Attributes:
        roots: the folders; None allows any path, for servers that no other process reaches.
    """

    roots: tuple[Path, ...] | None = None

    def check(self, message: Message) -> None:
        """Refuses a message whose `path`, or `refill` that is not empty, lies outside all folders.

        Raises:
            RefusedError: it does.
        """
        path, refill = message.body.get("path"), message.body.get("refill")
        verb = "write" if message.kind is Kind.SAVE else "read"
        if isinstance(path, str):
            self._check_path(path, verb)
        if isinstance(refill, str) and refill:
            self._check_path(refill, verb)

    def _check_path(self, path: str, verb: str) -> None:
        if self.roots is None:
            return
        try:
            found = Path(path).resolve()
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a null byte
            what = f"the path {path!r:.{_LONGEST}} cannot be used: {error}"
            raise RefusedError("bad_message", what) from error
        if any(found.is_relative_to(root.resolve()) for root in self.roots):
            return
        folders = ", ".join(map(str, self.roots))
        what = f"servers {verb} checkpoints below {folders} alone, not {path:.{_LONGEST}}"
        hint = "allow the folder when the job starts: jaxfleet launch --save-dir DIR, or set"
        raise RefusedError("checkpoint", what, hint=f"{hint} JAXFLEET_SAVE_DIR for servers")
