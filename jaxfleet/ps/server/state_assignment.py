"""Assignment of a state that trainers send: the initial one, or another in its place."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.ps.server.outbox import DeviceTask, Outbox, Request, RequestError, tensors_bytes
from jaxfleet.ps.server.recovery_saver import RecoverySaver
from jaxfleet.ps.server.state import ServerState
from jaxfleet.transport.messages import Kind, Message, Tensor


@dataclass
class StateAssignment:
    """Assigns states sent by trainers; a state is visible only once it is in a recovery checkpoint.

    `most_bytes` limits the trainers' own state.
    """

    held: ServerState
    outbox: Outbox
    own: RecoverySaver
    most_bytes: int
    resume_work: Callable[[], None]
    _assigned: set[str] = field(default_factory=set)

    def check(self, message: Message) -> None:
        """Rejects values whose name, dtype or shape does not fit the program."""
        plan, extras = self.held.plan, self.held.extras.bytes
        if extras + tensors_bytes(message.tensors) > self.most_bytes:
            what = f"trainers' own state has {extras} bytes already, of {self.most_bytes}"
            hint = "let servers update the optimizer's state (docs/parameter-servers.md)"
            raise RequestError("bad_message", what, hint=hint)
        for tensor in message.tensors:
            if tensor.name not in plan.state:
                if plan.server != 0:
                    what = f"server {plan.server} does not hold '{tensor.name}'"
                    raise RequestError("bad_message", what)
                continue
            wanted, array = plan.types[tensor.name], tensor.array
            if array.dtype != wanted.dtype or array.shape != wanted.shape:
                found = f"{array.dtype}{list(array.shape)}"
                what = f"'{tensor.name}' is {found}, not {wanted.dtype}{list(wanted.shape)}"
                raise RequestError("bad_message", what)

    def assign(self, request: Request) -> None:
        """Assigns the initial state; an existing state is kept."""
        message, scheduler = request.message, self.held.scheduler
        self.check(message)

        def answer() -> None:
            self.outbox.reply(request, Kind.OK)

        if scheduler.applied >= 0:
            scheduler.duplicates += len(message.tensors)
            if message.step == scheduler.applied:
                self.held.keep_extras(message.tensors, message.step)
            answer()
            return
        fresh = [tensor for tensor in message.tensors if tensor.name not in self._assigned]
        self._assigned.update(tensor.name for tensor in fresh)
        self.held.keep_extras(message.tensors, message.step)
        self._start(fresh, message.step, answer, replace=False)

    def replace(self, message: Message, answer: Callable[[], None]) -> None:
        """Replaces the state by one that all trainers sent."""
        self.held.keep_extras(message.tensors, message.step)
        self.own.is_outdated = True
        self._start(message.tensors, message.step, answer, replace=True)

    def _start(
        self, tensors: Sequence[Tensor], step: int, answer: Callable[[], None], *, replace: bool
    ) -> None:
        held, scheduler = self.held, self.held.scheduler
        own = {tensor.name: tensor.array for tensor in tensors if tensor.name in held.plan.state}
        if not replace:
            held.base = step

        def is_kept() -> None:
            scheduler.restart(step)
            answer()
            self.resume_work()

        def then(views: Mapping[str, np.ndarray]) -> None:
            held.host.update(views)
            held.forget_past(own, step)
            if (replace or scheduler.applied < 0) and not held.executor.missing():
                self.own.save(held, step, is_kept)  # a visible state must be durable
            else:
                answer()

        self.outbox.tasks.append(
            DeviceTask("taking a state", lambda: held.executor.assign(own), then)
        )
