"""Registers the old names, and takes them back."""

import sys

from jaxfleet.compat.forward import Forward
from jaxfleet.compat.names import MODULES
from jaxfleet.errors import ProgramError


def install() -> None:
    """Registers `paddle` and its submodules, each standing for ours. Again, it does nothing.

    Raises:
        ProgramError: another `paddle` has been imported.
    """
    known = sys.modules.get("paddle")
    if isinstance(known, Forward):
        return
    if known is not None:
        where = getattr(known, "__file__", None) or "a module without a file"
        hint = "call jaxfleet.compat.install() before anything imports paddle"
        raise ProgramError(f"another paddle has been imported: {where}", hint=hint)
    for name, targets in MODULES.items():  # a package stands before what is in it
        module = Forward(name, targets)
        sys.modules[name] = module
        package, _, last = name.rpartition(".")
        if package:
            setattr(sys.modules[package], last, module)


def uninstall() -> None:
    """Takes back what `install` registered; what was imported by those names stays in use."""
    for name in MODULES:
        if isinstance(sys.modules.get(name), Forward):
            del sys.modules[name]
