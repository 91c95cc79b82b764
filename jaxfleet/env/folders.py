"""Folders that are this user's alone, so that what is in them can be trusted."""

import grp
import os
import pwd
import stat
import tempfile
from functools import cache
from pathlib import Path

from jaxfleet.env.reading import get


def is_private(folder: Path) -> bool:
    """Whether nobody but this user, or root, can change what a folder holds.

    It belongs to this user, and neither others nor its group, unless that is this user's alone, may
    write to it. No folder above it can be exchanged by anyone else either: each is this user's or
    root's, and if others may write to one, as to `/tmp`, they may not rename what is not theirs
    (the sticky bit).
    """
    try:
        real = folder.resolve(strict=True)
        found = real.stat()
        above = [parent.stat() for parent in real.parents]
    except (OSError, RuntimeError):
        return False
    own = found.st_uid == os.geteuid() and not _others_write(found)
    return own and all(
        one.st_uid in {0, os.geteuid()} and (not _others_write(one) or one.st_mode & stat.S_ISVTX)
        for one in above
    )


def _others_write(found: os.stat_result) -> bool:
    by_group = found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid)
    return bool(by_group or found.st_mode & stat.S_IWOTH)


@cache
def _is_own_group(number: int) -> bool:
    """Whether a group is this user's alone, as systems make one for each user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def runtime_dir() -> Path | None:
    """Returns a folder of this user's for what lasts as long as processes do; None without one.

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
