"""Of which job a process is, whatever its role."""

import os
from dataclasses import dataclass
from pathlib import Path

from jaxfleet.env.names import (
    INSECURE,
    JOB,
    MEETING_DIR,
    RESTART,
    SAVE_DIR,
    SECRET_FILE,
)
from jaxfleet.env.reading import get, read_number


@dataclass(frozen=True)
class JobName:
    """Holds what tells a job from others on its network.

    Attributes:
        name: `JAXFLEET_JOB`.
        secret_file: `JAXFLEET_SECRET_FILE`; who knows what it holds may take part.
        insecure: `JAXFLEET_INSECURE`; `1` lets a server start without a secret.
        save_dirs: `JAXFLEET_SAVE_DIR`; the folders, separated as in `PATH`, below which servers
            write and read the checkpoints that trainers name. Empty unless it is set.
    """

    name: str
    secret_file: Path | None
    insecure: bool = False
    save_dirs: tuple[Path, ...] = ()


def read_job() -> JobName:
    """Returns of which job this process is, whoever tells it its role."""
    secret_file = get(SECRET_FILE)
    return JobName(
        get(JOB) or "default",
        Path(secret_file) if secret_file else None,
        insecure=get(INSECURE) not in {"", "0"},
        save_dirs=tuple(Path(word) for word in get(SAVE_DIR).split(os.pathsep) if word),
    )


def read_meeting_dir() -> Path | None:
    """Returns the folder in which processes of this job meet, None where none is said."""
    folder = get(MEETING_DIR)
    return Path(folder) if folder else None


def read_restart() -> int:
    """Returns how often this job has been started again (`JAXFLEET_RESTART`).

    Raises:
        StrategyError: it is no number.
    """
    return read_number(RESTART, least=0, hint="leave it to the launch") if get(RESTART) else 0
