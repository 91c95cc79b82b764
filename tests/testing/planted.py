"""Bugs that tests plant in the product, each a kind that the simulation must find."""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from jaxfleet.checkpoint import files
from jaxfleet.ps.client.server_recovery import ServerRecovery
from jaxfleet.ps.server.async_scheduler import AsyncScheduler
from jaxfleet.ps.server.data_ledger import DataLedger
from jaxfleet.ps.server.scheduler import Progress
from jaxfleet.ps.server.staleness import TrainerClocks
from jaxfleet.testing.simulation import substitutes
from jaxfleet.transport.messages import Message


def double_apply(patch: pytest.MonkeyPatch) -> None:
    """An asynchronous server applies a push again that arrives a second time."""
    push = AsyncScheduler.push

    def apply(self: AsyncScheduler, *given: Any) -> None:
        with pytest.MonkeyPatch.context() as within:  # elsewhere it answers what has come
            within.setattr(AsyncScheduler, "_newest", lambda *_: -1)
            push(self, *given)

    patch.setattr(AsyncScheduler, "push", apply)


def lost_fsync(patch: pytest.MonkeyPatch) -> None:
    """Checkpoints are renamed before their content is on disk, and torn blocks are accepted."""
    sync = files.sync
    for name, module in list(sys.modules.items()):  # another thread may import
        if name.startswith("jaxfleet.") and getattr(module, "sync", None) is sync:
            patch.setattr(module, "sync", lambda _: None)
    patch.setattr(substitutes, "reading_sum", lambda _: _Anything())


class _Anything:
    """Equals every checksum."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def staleness_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """A server lets a trainer be one step further ahead than the bound allows."""
    before = TrainerClocks.before

    def behind(self: TrainerClocks, step: int) -> Iterable[int]:
        return before(self, step - self.bound - 1)

    patch.setattr(TrainerClocks, "behind", behind)


def no_dedup_after_restart(patch: pytest.MonkeyPatch) -> None:
    """A restarted asynchronous server forgets which pushes its checkpoint contains."""
    resume = AsyncScheduler.resume

    def forgetful(self: AsyncScheduler, progress: Progress) -> None:
        steps = dict.fromkeys(progress.steps, 0)
        resume(self, Progress(progress.number, steps, dict.fromkeys(progress.kinds, steps)))

    patch.setattr(AsyncScheduler, "resume", forgetful)


def never_asked_again(patch: pytest.MonkeyPatch) -> None:
    """A client does not send again the last of the messages that a server reports missing."""
    send_missing: Callable[..., None] = ServerRecovery.send_missing

    def lossy(self: ServerRecovery, server: int, answer: Message) -> None:
        missing = answer.body.get("missing")
        kept: list[Any] = missing[:-1] if isinstance(missing, list) else []
        body = {**answer.body, "missing": kept, "lacks": False}
        send_missing(self, server, Message(answer.kind, answer.sender, body=body))

    patch.setattr(ServerRecovery, "send_missing", lossy)


def forgotten_lease(patch: pytest.MonkeyPatch) -> None:
    """A restarted server 0 leases samples again that trainers have from its earlier life."""
    patch.setattr(DataLedger, "adopt", lambda *_: None)


# Each with a seed that finds it soon, where the default tests begin.
BUGS: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    double_apply: 35,
    lost_fsync: 29,
    staleness_off_by_one: 5,
    no_dedup_after_restart: 306,
    never_asked_again: 7,
    forgotten_lease: 347,
}
