"""Collective requests of all trainers: reductions, barriers, and replacing the state."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from jaxfleet.ps.server.outbox import (
    Outbox,
    Request,
    RequestError,
    request_error,
    string_field,
    tensors_bytes,
)
from jaxfleet.ps.server.request_router import RequestRouter
from jaxfleet.ps.server.trainer_registry import TrainerRegistry
from jaxfleet.transport.consistency import same_leaves_hint
from jaxfleet.transport.messages import Kind, Message, Tensor

REDUCTIONS: Mapping[str, Callable[..., np.ndarray]] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
GATHER = "gather"

_MOST_WAITING = 1024  # pending collectives of one trainer

Key = tuple[str, int, str]  # purpose, step, name


@dataclass
class Collective:
    """One collective operation of all trainers; it has an `answer` once all have joined."""

    key: Key
    requests: dict[int, Request] = field(default_factory=dict)
    answer: tuple[Tensor, ...] | None = None

    @property
    def rewinds(self) -> bool:
        """Whether the trainers meet in order to go on from a restored state."""
        return any(request.message.body.get("rewinds") for request in self.requests.values())

    def is_new_round(self, request: Request) -> bool:
        """Whether an answered trainer starts another collective with this key."""
        old = self.requests.get(request.trainer)
        if self.answer is None or old is None:
            return False
        return old.message.number < request.message.number  # otherwise a late duplicate

    def in_order(self) -> list[Message]:
        return [self.requests[trainer].message for trainer in sorted(self.requests)]


def reduce_tensors(how: str, requests: Sequence[Message]) -> tuple[Tensor, ...]:
    """Reduces the tensors of all trainers, in their order."""
    made = []
    for place, first in enumerate(requests[0].tensors):
        arrays = [request.tensors[place].array for request in requests]
        made.append(Tensor(first.name, _reduced(how, arrays)))
    return tuple(made)


def _reduced(how: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    if how == GATHER:
        return np.stack(arrays)
    if len(arrays) == 1:
        return arrays[0].copy()
    reduce = REDUCTIONS[how]
    with np.errstate(all="ignore"):  # infinities and NaNs occur on one device as well
        total: np.ndarray = np.asarray(reduce(arrays[0], arrays[1], dtype=arrays[0].dtype))
        for array in arrays[2:]:
            total = np.asarray(reduce(total, array, dtype=total.dtype))
    return total


def reduction_mismatch(how: object, message: Message) -> str | None:
    """Returns the reason that arrays cannot be reduced this way, if so."""
    if how == GATHER:
        return None
    if not isinstance(how, str) or how not in REDUCTIONS:
        return f"there is no reduction {how!r}, only {', '.join(REDUCTIONS)}, {GATHER}"
    for tensor in message.tensors:
        if how in {"and", "or", "xor"} and tensor.array.dtype.kind not in "biu":
            return f"'{tensor.name}' is {tensor.array.dtype}, which has no bits to {how}"
    return None


def _outline(message: Message) -> str:
    arrays = ", ".join(f"{t.name} {t.array.dtype}{list(t.array.shape)}" for t in message.tensors)
    how = message.body.get("how")
    return f"[{arrays}]" if how is None else f"{how} of [{arrays}]"


_SHOWN_LEAVES = 6  # leaves shown in an error


@dataclass
class CollectiveHandler:
    """The collectives of a server's trainers: those pending, and replies that may be repeated."""

    outbox: Outbox
    trainers: TrainerRegistry
    router: RequestRouter
    most_bytes: int
    _held: dict[Key, Collective] = field(default_factory=dict)

    def assign(self, request: Request) -> None:
        """Assigns an initial state at once, and a replacement when all trainers have sent it."""
        message = request.message
        if not message.body.get("replace"):
            self.router.loaded.assignment.assign(request)
            return
        self.router.loaded.assignment.check(message)
        names = ",".join(sorted(tensor.name for tensor in message.tensors))
        key = ("assign", request.step, f"{message.body.get('round', '')}{names}")
        is_answered = key in self._held and self._held[key].answer is not None
        for meeting in self.waiting() if not is_answered else ():
            if meeting.key[:2] == key[:2] and meeting.key != key:
                found = [*meeting.in_order(), message]
                refusal = _differing_leaves(request.step, [(m.sender, _leaves(m)) for m in found])
                self._refuse(meeting, refusal)
                raise refusal
        self._join(key, request)

    def passed_by(self) -> tuple[Collective, RequestError] | None:
        """Returns an assignment that some trainer has skipped, and the error."""
        for meeting in self.waiting():
            kind, step, _ = meeting.key
            known = self.trainers.by_id
            gone = [n for n in self.absent(meeting) if n in known and known[n].pushed > step]
            if kind == "assign" and gone:
                gave = [(m.sender, _leaves(m)) for m in meeting.in_order()]
                refusal = _differing_leaves(
                    step, [*gave, *((f"trainer {n}", "none") for n in gone)]
                )
                return meeting, refusal
        return None

    def _refuse(self, meeting: Collective, refusal: RequestError) -> None:
        self.drop(meeting)
        for request in meeting.requests.values():
            self.outbox.refuse(request, refusal)

    def reduce(self, request: Request) -> None:
        message = request.message
        key = ("reduce", message.step, string_field(message, "key"))
        if message.body.get("peek"):
            met = self._held.get(key)
            is_answered = met is not None and met.answer is not None
            self.outbox.reply(request, Kind.REDUCED, {"answered": is_answered})
            return
        how = string_field(message, "how")
        misfit = reduction_mismatch(how, message) or self._misfit(key, message)
        if misfit is not None:
            raise RequestError("bad_message", f"'{key[2]}' of step {message.step}: {misfit}")
        self._join(key, request)

    def barrier(self, request: Request) -> None:
        self._join(("barrier", request.step, string_field(request.message, "name")), request)

    def waiting(self) -> list[Collective]:
        return [meeting for meeting in self._held.values() if meeting.answer is None]

    def requests(self) -> list[Request]:
        return [r for meeting in self.waiting() for r in meeting.requests.values()]

    def absent(self, meeting: Collective) -> list[int]:
        return [n for n in self._wanted(meeting) if n not in meeting.requests]

    def has_passed(self, trainer: int, meeting: Collective) -> bool:
        """Whether a trainer no longer waits for a collective: it has pushed in a later step."""
        known = self.trainers.by_id.get(trainer)
        return known is not None and (known.left or known.pushed > meeting.key[1])

    def drop_replayed(self) -> None:
        """Discards the collectives that all trainers had completed before the server restarted.

        A trainer replays them for one that lost its reply, and that one may have lost none.
        """
        for meeting in self.waiting():
            if all(self.has_passed(n, meeting) for n in (*meeting.requests, *self.absent(meeting))):
                self.drop(meeting)

    def drop(self, meeting: Collective) -> None:
        self._held.pop(meeting.key, None)

    def one_left(self) -> None:
        """Completes collectives that waited only for a trainer that has left."""
        for meeting in self.waiting():
            self._complete(meeting)

    def forget_strangers(self) -> None:
        """Discards all collectives, none of which came from the job's trainers."""
        self._held.clear()

    def forget_process(self, trainer: int, *, keeps_answers: bool = False) -> None:
        """Discards requests of a trainer's previous process, which had other numbers.

        One that resumes that process's step asks again, and gets the same answers.
        """
        if not keeps_answers:
            self._forget_answers()
        for meeting in self._held.values():
            meeting.requests.pop(trainer, None)

    def forget(self) -> None:
        """Discards all replies, which are void, but for those about the rewind itself.

        A trainer may have lost the reply that lets it take part in the rewind.
        """
        self._held = {
            key: meeting
            for key, meeting in self._held.items()
            if meeting.answer is None or meeting.rewinds
        }
        self.trainers.rewind(self.router.step)

    def _forget_answers(self, before: float = math.inf) -> None:
        """Discards replies of steps before one."""
        self._held = {
            key: meeting
            for key, meeting in self._held.items()
            if meeting.answer is None or key[1] >= before
        }

    def _misfit(self, key: Key, message: Message) -> str | None:
        """Describes how a request differs from earlier ones for the same key, if it does."""
        meeting = self._held.get(key)
        if meeting is None or meeting.answer is not None:
            return None
        for other in meeting.in_order():
            if _outline(other) != _outline(message):
                return (
                    f"{other.sender} sent {_outline(other)}, {message.sender} {_outline(message)}"
                )
        return None

    def _join(self, key: Key, request: Request) -> None:
        """Adds a trainer's request; a duplicate only updates its connection."""
        self._check_room(key, request)
        meeting = self._held.get(key)
        if meeting is None or meeting.is_new_round(request):
            meeting = self._held[key] = Collective(key)
        old = meeting.requests.get(request.trainer)
        # The first request counts; the reply may go to another connection.
        meeting.requests[request.trainer] = replace(old, peer=request.peer) if old else request
        if meeting.answer is not None:
            self._answer(meeting, request)
        else:
            self._complete(meeting)

    def _check_room(self, key: Key, request: Request) -> None:
        """Rejects a new collective beyond the server's limits."""
        if key in self._held:
            return
        met = [meeting.requests.get(request.trainer) for meeting in self.waiting()]
        waiting = [old for old in met if old is not None]
        held = sum(tensors_bytes(old.message.tensors) for old in [*waiting, request])
        if len(waiting) >= _MOST_WAITING or held > self.most_bytes:
            what = f"trainer {request.trainer} waits in {len(waiting)} meetings, of {held} bytes"
            raise RequestError("bad_message", what, hint="wait for answers before asking for more")

    def _complete(self, meeting: Collective) -> None:
        if not meeting.requests or self.absent(meeting):
            return
        if meeting.key[0] == "reduce" and not self._reduced(meeting):
            return
        meeting.answer = meeting.answer or ()
        if meeting.key[0] == "assign":
            first = meeting.in_order()[0]
            self.router.loaded.assignment.replace(first, lambda: self._answer_all(meeting))
        else:
            self._answer_all(meeting)
        steps = [known.step for known in self.trainers.present()]
        self._forget_answers(min(steps, default=0) - 1)

    def _reduced(self, meeting: Collective) -> bool:
        """Reduces the arrays; reports a failure to all."""
        requests = meeting.in_order()
        try:
            meeting.answer = reduce_tensors(str(requests[0].body["how"]), requests)
        except (TypeError, ValueError) as error:
            self._refuse(meeting, request_error("failed", error))
            return False
        return True

    def _wanted(self, meeting: Collective) -> Sequence[int]:
        """Returns the trainers that must join; a barrier does not wait for those that left."""
        is_barrier = meeting.key[0] == "barrier"
        return self.trainers.staying() if is_barrier else range(self.trainers.count)

    def _answer_all(self, meeting: Collective) -> None:
        for request in meeting.requests.values():
            self._answer(meeting, request)

    def _answer(self, meeting: Collective, request: Request) -> None:
        kind = Kind.REDUCED if meeting.key[0] == "reduce" else Kind.OK
        self.outbox.reply(request, kind, {}, meeting.answer or ())


def _differing_leaves(step: int, gave: Sequence[tuple[str, str]]) -> RequestError:
    """Returns the error for trainers that replaced different leaves after a step."""
    listed = "; ".join(f"{sender} gave {leaves}" for sender, leaves in gave)
    what = f"trainers replaced other leaves of the state than each other after step {step}"
    return RequestError("refused", f"{what}: {listed}", hint=same_leaves_hint("trainer"))


def _leaves(message: Message) -> str:
    """Lists the leaves of an assign without their slices: `'state/epoch'`."""
    names = dict.fromkeys(re.sub(r"\.block\d+$", "", tensor.name) for tensor in message.tensors)
    shown = ", ".join(f"'{name}'" for name in list(names)[:_SHOWN_LEAVES])
    more = len(names) - _SHOWN_LEAVES
    return f"{shown} and {more} more" if more > 0 else shown or "none"
