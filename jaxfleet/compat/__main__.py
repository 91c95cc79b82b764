"""Runs `python -m jaxfleet.compat`."""

import sys

from jaxfleet.compat.running import main

if __name__ == "__main__":
    sys.exit(main())
