"""Ends a script whose passes alone are of interest: `jaxfleet dump --until-compiled`."""

from jaxfleet.env import read_environment


def end_if_only_dumping() -> None:
    """Ends the process where the environment asks for dumps and no training.

    Raises:
        SystemExit: it does; `except Exception` in a script lets it pass.
    """
    if read_environment().dump_until_compiled:
        raise SystemExit(0)
