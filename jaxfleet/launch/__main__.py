"""Runs the equivalent of `paddle.distributed.launch` as `python -m jaxfleet.launch`."""

import sys

from jaxfleet.launch.paddle_launch import main

if __name__ == "__main__":
    sys.exit(main())
