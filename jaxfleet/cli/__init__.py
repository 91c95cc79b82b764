"""The command line: `jaxfleet opt`, `diff`, `passes`, `dump` and `plan`."""

from jaxfleet.cli.app import main as main
