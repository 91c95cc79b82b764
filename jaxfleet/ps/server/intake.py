"""Takes states in: the first one, and one that all trainers put in the place of another."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.ps.messages import Kind, Message, Tensor
from jaxfleet.ps.server.desk import Desk, Job, RefusedError, Request, tensors_bytes
from jaxfleet.ps.server.held import Held
from jaxfleet.ps.server.own_saves import OwnSaves


@dataclass
class Intake:
    """Where states come in.

    Attributes:
        held: what they go into.
        desk: where answers and work go.
        own: nobody sees a state before it is in one of these.
        most_bytes: the most that trainers' own state may have.
        go_on: is called when there is a whole state.
    """

    held: Held
    desk: Desk
    own: OwnSaves
    most_bytes: int
    go_on: Callable[[], None]
    _assigned: set[str] = field(default_factory=set)

    def check(self, message: Message) -> None:
        """Refuses values that the server cannot hold.

        Raises:
            RefusedError: a name, a dtype or a shape is wrong.
        """
        plan, extras = self.held.plan, self.held.extras.bytes
        if extras + tensors_bytes(message) > self.most_bytes:
            raise RefusedError("bad_message", f"trainers' own state has {extras} bytes already")
        for tensor in message.tensors:
            if tensor.name not in plan.state:
                if plan.server != 0:
                    what = f"server {plan.server} does not hold '{tensor.name}'"
                    raise RefusedError("bad_message", what)
                continue
            wanted, array = plan.types[tensor.name], tensor.array
            if array.dtype != wanted.dtype or array.shape != wanted.shape:
                found = f"{array.dtype}{list(array.shape)}"
                what = f"'{tensor.name}' is {found}, not {wanted.dtype}{list(wanted.shape)}"
                raise RefusedError("bad_message", what)

    def assign(self, request: Request) -> None:
        """Takes the first state; where there is one, it stays."""
        message, progress = request.message, self.held.progress
        self.check(message)

        def answer() -> None:
            self.desk.answer(request.peer, message, Kind.OK)

        if progress.applied >= 0:
            progress.duplicates += len(message.tensors)
            if message.step == progress.applied:
                self.held.keep_extras(message.tensors, message.step)
            answer()
            return
        fresh = [tensor for tensor in message.tensors if tensor.name not in self._assigned]
        self._assigned.update(tensor.name for tensor in fresh)
        self.held.keep_extras(message.tensors, message.step)
        self._start(fresh, message.step, answer, replace=False)

    def replace(self, message: Message, answer: Callable[[], None]) -> None:
        """Takes a state that all trainers sent, in the place of what there was."""
        self.held.keep_extras(message.tensors, message.step)
        self.own.is_outdated = True
        self._start(message.tensors, message.step, answer, replace=True)

    def _start(
        self, tensors: Sequence[Tensor], step: int, answer: Callable[[], None], *, replace: bool
    ) -> None:
        held, progress = self.held, self.held.progress
        own = {tensor.name: tensor.array for tensor in tensors if tensor.name in held.plan.state}

        def is_kept() -> None:
            progress.restart(step)
            answer()
            self.go_on()

        def then(views: Mapping[str, np.ndarray]) -> None:
            held.host.update(views)
            if (replace or progress.applied < 0) and not held.machine.missing():
                self.own.save(held, step, is_kept)  # nobody sees a state that may be lost again
            else:
                answer()

        self.desk.jobs.append(Job("taking a state", lambda: held.machine.assign(own), then))
