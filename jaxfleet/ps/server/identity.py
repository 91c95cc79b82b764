"""Who a server is, as other servers and its own checkpoints are told."""

from dataclasses import dataclass

import numpy as np


@dataclass
class Identity:
    """A server of a job; the trainers say of which.

    Attributes:
        incarnation: tells this server from the one before it.
        job: the job's name.
        program: the hash of the job's program.
        text: that program's text, packed, for the next start; None where it is not known.
    """

    incarnation: str = ""
    job: str = ""
    program: str = ""
    text: np.ndarray | None = None
