"""`jaxfleet passes`: lists passes with their options; imports the user's passes."""

import argparse
import importlib
import sys
from typing import Any

import jaxfleet.passes  # noqa: F401  # registers ours
from jaxfleet.errors import PassError
from jaxfleet.pipeline import load_plugins, options_of, registered_passes


def add_import_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--import MODULE`, which may be repeated."""
    parser.add_argument(
        "--import",
        metavar="MODULE",
        dest="imports",
        action="append",
        default=[],
        help="import a module that registers passes: one of the current folder, my_passes for "
        "my_passes.py, or an installed one; may be given several times",
    )


def import_passes(args: argparse.Namespace) -> None:
    """Imports installed plug-ins, and the modules given by `--import`."""
    load_plugins()
    if args.imports and "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does, but a console script does not
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


_EXAMPLE = """\
example:
  jaxfleet passes --import my_passes   # the module my_passes.py of the current folder
"""


def add_parser(commands: Any, about: str) -> None:
    """Adds the command; `about` is its line in the list of commands."""
    parser = commands.add_parser(
        "passes",
        help=about,
        description="Lists the passes that pipelines may name, with their options and defaults: "
        "jaxfleet's, those of installed plug-ins, and those of modules that --import names.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_import_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit status."""
    import_passes(args)
    for name, cls in registered_passes().items():
        summary = (cls.__doc__ or "").strip().split("\n")[0]
        print(f"{name}: {summary}")
        for option in options_of(cls):
            print(f"    {option}")
    return 0
