"""Passes of the user's own, made known to a command: by `--import`, or by an installed plug-in."""

import argparse
import importlib
import sys

import jaxfleet.passes  # noqa: F401  # registers ours
from jaxfleet.errors import PassError
from jaxfleet.pipeline import load_plugins


def add_import_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--import MODULE`, which may be given several times."""
    parser.add_argument(
        "--import",
        metavar="MODULE",
        dest="imports",
        action="append",
        default=[],
        help="import a module that registers passes, from the current folder or installed",
    )


def import_passes(args: argparse.Namespace) -> None:
    """Imports installed plug-ins, and the modules that `--import` names.

    Raises:
        PassError: one of them cannot be imported.
    """
    load_plugins()
    if args.imports and "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does; a console script leaves it out
    for name in args.imports:
        try:
            importlib.import_module(name)
        except PassError:
            raise
        except Exception as error:
            raise PassError(
                f"--import {name}: {type(error).__name__}: {error}",
                hint="name a module as Python's import does: my_passes, not my_passes.py",
            ) from error
