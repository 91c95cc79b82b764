"""The command line: `jaxfleet` and its commands, a module each."""

from jaxfleet.cli.app import main as main
