"""A trainer's side of parameter servers: requests, recovery, tables, and running its program."""
