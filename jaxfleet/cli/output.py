"""Where the command line writes, and what its exit status says."""

import sys

DIFFERENT = 1
SCRIPT_FAILED = 1
USER_ERROR = 2


def log(text: str) -> None:
    """Prints a line about the data, which is not the data: to stderr."""
    print(text, file=sys.stderr)
