"""Whether this process is the rank that somebody takes it for."""

from jaxfleet.errors import StrategyError
from jaxfleet.ops.frames import line_of_caller


def check_same_rank(who: str, said: tuple[int, int], here: tuple[int, int], hint: str) -> None:
    """Refuses what is for another rank than this process is.

    Args:
        who: says so; the message begins with it: `the program is that of`.
        said: the rank, and of how many.
        here: the same of this process, in the group that it has joined, or is to join.
        hint: what to do.

    Raises:
        StrategyError: it is another.
    """
    if said != here:
        what = f"{who} rank {said[0]} of {said[1]}, and this process is rank {here[0]} of {here[1]}"
        raise StrategyError(what, source=line_of_caller(), hint=hint)
