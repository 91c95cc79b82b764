"""Who a server is, as other servers and its own checkpoints are told."""

from dataclasses import dataclass


@dataclass
class Identity:
    """A server of a job; the trainers say of which.

    Attributes:
        incarnation: tells this server from the one before it.
        job: the job's name.
        program: the hash of the job's program.
    """

    incarnation: str = ""
    job: str = ""
    program: str = ""
