"""Says how trainers and servers go together, and what bounds how old values may be."""

from collections.abc import Iterator

from jaxfleet.ir import Program
from jaxfleet.ps.manner import Manner


def about_mode(trainer: Program, trainers: int) -> Iterator[str]:
    """Says what a trainer's program says of its mode.

    Args:
        trainer: the program.
        trainers: how many there are.
    """
    manner = Manner.of(trainer)
    if manner is None:
        yield "communication sync: all trainers wait for each other at every step, as on one device"
        return
    how = {
        "async": "gradients are sent as soon as they are computed, and no trainer waits; up to "
        f"{manner.merge} (merge) are added up in one message while an answer is pending",
        "half_async": f"one message has the mean of the gradients of {manner.merge} steps (merge), "
        "and the trainer waits for its answer",
        "dc_asgd": "trainers wait for the answer to each gradient; servers correct it by "
        f"{trainer.attrs.get('compensation')} g g (w - w'), w' what its trainer last received",
        "geo": f"trainers update on their own; every {manner.k_steps} steps (k_steps) they send "
        f"1/{trainers} of their change",
        "fl": f"trainers update on their own; every {manner.k_steps} steps (k_steps) they send "
        "their parameters and go on with the mean",
    }
    yield f"communication {manner.communication}: {how[manner.communication]}"
    if manner.averages_state:
        yield f"values are at most {manner.k_steps - 1} steps old: an exchange waits for all"
        return
    yield (
        f"staleness {manner.staleness}: a step sees all that every trainer sent up to "
        f"{manner.staleness + 1} steps before; a trainer further ahead waits for the slowest"
    )
