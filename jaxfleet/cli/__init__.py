"""The command line: `jaxfleet` and its commands, one module each."""

from jaxfleet.cli.app import main as main
