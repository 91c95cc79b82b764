"""Output streams and exit statuses of the command line."""

import sys

DIFFERENT = 1
SCRIPT_FAILED = 1
USER_ERROR = 2


def log(text: str) -> None:
    """Prints a message to stderr, apart from the data."""
    print(text, file=sys.stderr)
