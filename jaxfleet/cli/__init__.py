"""The command line: `jaxfleet opt`, `diff`, `passes` and `dump`."""

from jaxfleet.cli.app import main as main
