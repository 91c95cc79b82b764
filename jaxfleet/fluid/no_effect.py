"""Arguments that are taken and change nothing here: one warning each, with the reason.

The rule for all of the front end: an argument acts, or is refused, or warns once that it has no
effect and why. Only hints to a compiler are silent; `docs/fluid-arguments.md` lists all three.
"""

from jaxfleet.ops.frames import warn_at_caller

_WARNED: set[str] = set()


def warn_no_effect(argument: str, reason: str) -> None:
    """Warns at the user's line that an argument has no effect, once a process for each argument.

    Args:
        argument: as the user wrote it: `BuildStrategy.remove_unnecessary_lock`.
        reason: why it has none, and what to use instead if there is something.
    """
    if argument in _WARNED:
        return
    _WARNED.add(argument)
    warn_at_caller(f"{argument} has no effect here: {reason}")


def forget_warnings() -> None:
    """Makes every argument warn again, for tests."""
    _WARNED.clear()
