"""Folders that only this user can modify."""

import grp
import os
import pwd
import stat
import tempfile
from functools import cache
from pathlib import Path

from jaxfleet.env.variables import get

_OVERFLOW_USER = Path("/proc/sys/kernel/overflowuid")
_USER_MAP = Path("/proc/self/uid_map")
_ALL_USERS = 2**32 - 1


def is_private(folder: Path) -> bool:
    """Whether only this user and root can modify the content of a folder.

    The folder belongs to this user, and is writable neither by others nor by its group, unless the
    group has no other members. The same holds for its parents, which may also belong to root or, as
    users outside of a user namespace appear inside it, to the system's overflow user, and may be
    writable by others if they are sticky, as `/tmp` is.
    """
    try:
        real = folder.resolve(strict=True)
        found = real.stat()
        above = [parent.stat() for parent in real.parents]
    except (OSError, RuntimeError):
        return False
    own = found.st_uid == os.geteuid() and not _others_write(found)
    owners = _users_above()
    return own and all(
        one.st_uid in owners and (not _others_write(one) or one.st_mode & stat.S_ISVTX)
        for one in above
    )


def _others_write(found: os.stat_result) -> bool:
    by_group = found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)
    return bool(by_group or found.st_mode & stat.S_IWOTH)


def _users_above() -> set[int]:
    """Returns the users that parents of a private folder may belong to."""
    users = {0, os.geteuid()}
    try:
        if not _maps_all_users(_USER_MAP.read_text()):
            users.add(int(_OVERFLOW_USER.read_text()))
    except (OSError, ValueError):  # a system without user namespaces
        pass
    return users


def _maps_all_users(text: str) -> bool:
    """Whether this is the map of the initial user namespace: rows of inside, outside, count."""
    return any(int(row.split()[2]) == _ALL_USERS for row in text.splitlines())


@cache
def _is_own_group(number: int) -> bool:
    """Whether a group is the private group of this user, which has no other members."""
    try:
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def runtime_dir() -> Path | None:
    """Returns a private folder for files that live as long as a process; None if there is none.

    It is `jaxfleet` in `XDG_RUNTIME_DIR`, or `jaxfleet-USER` beside other temporary files.
    """
    given = get("XDG_RUNTIME_DIR")
    user = os.geteuid()
    folder = Path(given) / "jaxfleet" if given else Path(tempfile.gettempdir()) / f"jaxfleet-{user}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return folder if is_private(folder) else None
