"""Position: how far a job has read its source, as plain numbers for a checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

from jaxfleet.data.order import Order
from jaxfleet.errors import FeedError

_VERSION = 1  # of the order too: another shuffle needs another number


@dataclass(frozen=True)
class Position:
    """The next step, and all that determines which samples the steps before it have read.

    The number of processes does not, so another number of processes may go on from it; nor does the
    number of epochs.
    """

    version: int
    step: int
    samples: int
    batch_size: int
    seed: int
    shuffle: int
    drop_last: int

    @classmethod
    def of(cls, order: Order, step: int) -> Self:
        shuffle, drop_last = int(order.shuffle), int(order.drop_last)
        return cls(_VERSION, step, order.samples, order.batch_size, order.seed, shuffle, drop_last)

    def plain(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def read(cls, state: Mapping[str, object], order: Order) -> Self:
        """Returns the position that `plain` gave.

        Raises:
            FeedError: it is not one, or it is of another order.
        """
        here = cls.of(order, 0).plain()
        if "ledger" in state:
            what = "the position is that of a job whose trainers leased their samples"
            raise FeedError(what, hint="go on in a relaxed mode, with step.batches(loader)")
        if state.keys() != here.keys():
            what = (
                f"a position has {', '.join(here)}, and this state {', '.join(state) or 'nothing'}"
            )
            raise FeedError(what, hint="pass what state() of a loader or of its batches returned")
        numbers = {name: value for name, value in state.items() if type(value) is int}
        for name in state.keys() - numbers.keys():
            raise FeedError(f"'{name}' of the position is {state[name]!r}, which is not an integer")
        for name in here.keys() - {"step"}:
            if numbers[name] != here[name]:
                what = f"the position was saved with {name}={numbers[name]}, and this loader has"
                hint = "the same samples follow only with the same source, seed and batch_size; "
                hint += "begin again with from_step(0) to train with others"
                raise FeedError(f"{what} {name}={here[name]}", hint=hint)
        if not 0 <= numbers["step"] <= (numbers["step"] if order.steps is None else order.steps):
            what = f"the position is step {numbers['step']}, and the loader has {order.steps} steps"
            raise FeedError(what, hint="raise `epochs` to train longer")
        return cls(**numbers)
