"""Runs `paddle.distributed.launch_ps`'s likeness as `python -m jaxfleet.launch_ps`."""

import sys

from jaxfleet.launch.paddle_launch_ps import main

if __name__ == "__main__":
    sys.exit(main())
