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
        yield "communication sync: all wait for all at every step, as one device does its steps"
        return
    how = {
        "async": f"gradients go when they are made, nobody waits; at most {manner.merge} (merge) "
        "are summed to one message while an answer is under way",
        "half_async": f"the mean of {manner.merge} steps' gradients (merge) goes in one message, "
        "and its answer is waited for",
        "dc_asgd": "each gradient's answer is waited for; servers correct it by "
        f"{trainer.attrs.get('compensation')} g g (w - w'), w' what its trainer received last",
        "geo": f"trainers update; every {manner.k_steps} steps (k_steps) they send 1/{trainers} of "
        "how far they went",
        "fl": f"trainers update; every {manner.k_steps} steps (k_steps) they send what they have, "
        "and go on with the mean",
    }
    yield f"communication {manner.communication}: {how[manner.communication]}"
    if manner.averages_state:
        yield f"values are at most {manner.k_steps - 1} steps old: an exchange waits for all"
        return
    yield (
        f"staleness {manner.staleness}: a step has all that every trainer sent of its steps up to "
        f"{manner.staleness + 1} before; who is further ahead waits for the slowest"
    )
