"""The trainers' own state after their last steps, kept for a trainer that returns.

Trainer 0 sends it to server 0 (`keep`): of each step, the leaves that changed. A process that takes
the place of a lost trainer asks for it after one of the last two steps (`recall`), or for the
newest, where trainers are at steps of their own. Where they wait for each other only now and then,
each trainer sends its own, and its successor receives that.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxfleet.ps.server.outbox import Outbox, Request, RequestError, is_new, tensors_bytes
from jaxfleet.transport.messages import Kind, Tensor

_SMALLER = (
    "two versions of what trainers update are kept: let servers update the optimizer's state "
    '(docs/parameter-servers.md), or use on_trainer_lost="fail", which keeps none'
)

Versions = Mapping[str, Mapping[int, np.ndarray]]


@dataclass
class OwnState:
    """Versions of the leaves of all trainers, or of one.

    Attributes:
        step: the newest step that is kept; -1 if there is none.
        versions: by leaf and step, for the steps at which it changed.
    """

    step: int = -1
    versions: dict[str, dict[int, np.ndarray]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for of_leaf in self.versions.values() for array in of_leaf.values())

    def copy(self) -> "OwnState":
        """Returns these versions, which later ones do not change."""
        return OwnState(self.step, {name: dict(each) for name, each in self.versions.items()})

    def keep(self, step: int, tensors: Iterable[Tensor]) -> None:
        """Keeps the leaves that changed; what only steps before the last two need is dropped."""
        if step < self.step - 1:
            return  # a late duplicate
        for tensor in tensors:
            self.versions.setdefault(tensor.name, {})[step] = tensor.array.copy()
        self.step = max(self.step, step)
        for of_leaf in self.versions.values():
            oldest = max((at for at in of_leaf if at < self.step), default=self.step)
            for at in [at for at in of_leaf if at < oldest]:
                del of_leaf[at]

    def after(self, step: int) -> dict[str, np.ndarray]:
        """Returns the leaves as they were after a step."""
        found = {}
        for name, of_leaf in self.versions.items():
            if (at := max((at for at in of_leaf if at <= step), default=None)) is not None:
                found[name] = of_leaf[at]
        return found

    def is_past(self, step: int) -> bool:
        return step < self.step - 1

    def nearest(self, step: int) -> int:
        """Returns this step if its state is kept, or else the newest that is."""
        return self.step if self.is_past(step) else min(step, self.step)


@dataclass
class OwnStateHandler:
    """Takes the trainers' own state, and returns it to a trainer that takes a lost one's place.

    Attributes:
        states: by trainer; what all have alike is trainer 0's.
    """

    outbox: Outbox
    most_bytes: int
    states: dict[int, OwnState] = field(default_factory=dict)
    waiting: list[Request] = field(default_factory=list)

    def keep(self, request: Request) -> None:
        """Takes leaves from trainer 0, or of each trainer."""
        message = request.message
        if request.trainer != 0 and not _is_of_each(request):
            raise RequestError("bad_message", f"{message.sender} keeps no state; trainer 0 does")
        kept = sum(state.bytes for state in self.states.values())
        if kept + tensors_bytes(message.tensors) > self.most_bytes:
            what = (
                f"the trainers' own state has {kept} bytes already, and with "
                f"{tensors_bytes(message.tensors)} more of step {request.step} exceeds the limit "
                f"of {self.most_bytes}"
            )
            raise RequestError("bad_message", what, hint=_SMALLER)
        self._state_for(request).keep(request.step, message.tensors)
        self.outbox.reply(request, Kind.OK)
        self.serve()

    def recall(self, request: Request) -> None:
        """Queues a request until trainer 0 has sent the state after its step.

        What only the trainer itself has sent, it has sent before: it receives what there is.
        """
        if is_new(request, self.waiting):
            self.waiting.append(request)
        self.serve()

    def drop(self, request: Request) -> None:
        self.waiting = [other for other in self.waiting if other is not request]

    def serve(self) -> None:
        for request in list(self.waiting):
            step, state = request.step, self._state_for(request)
            if request.message.body.get("newest") and state.step >= 0:
                step = state.nearest(step)
            if state.is_past(step):
                what = f"the trainers' own state after step {step} is no longer kept"
                self.outbox.refuse(request, RequestError("bad_message", what))
                self.drop(request)
            elif step <= state.step or _is_of_each(request):
                found = state.after(step) if step <= state.step else {}
                arrays = tuple(Tensor(name, array) for name, array in found.items())
                self.outbox.reply(request, Kind.VALUES, {"kept": True}, arrays)
                self.drop(request)

    def _state_for(self, request: Request) -> OwnState:
        whose = request.trainer if _is_of_each(request) else 0
        return self.states.setdefault(whose, OwnState())


def _is_of_each(request: Request) -> bool:
    """Whether each trainer has a state of its own."""
    return request.message.body.get("each") is True
