"""Runs the command line as `python -m jaxfleet`."""

import sys

from jaxfleet.cli import main

if __name__ == "__main__":
    sys.exit(main())
