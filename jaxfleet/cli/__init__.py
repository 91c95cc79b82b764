"""The command line: `jaxfleet opt`, `diff`, `passes`, `dump`, `plan` and `launch`."""

from jaxfleet.cli.app import main as main
