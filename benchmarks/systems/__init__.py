"""The job of `faults.py`, as each system runs it, and the hosts that it runs on."""
