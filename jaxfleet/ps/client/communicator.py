"""Asynchronous communication of a trainer: its mode, and a communicator that merges and sends.

A step ends once its gradients are queued for sending, and the next begins with the newest complete
set of parameter values received by then; so a step mostly takes as long as its computation.
`CommunicationMode` specifies how many gradients are merged and what is awaited; the staleness bound
always holds.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from jaxfleet.ir import Operator, Program
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.host_ops import HostRun, PushBatcher
from jaxfleet.transport.messages import Plain, Tensor


@dataclass
class StalenessStats:
    """Histogram of the lag of steps behind the slowest trainer."""

    bound: int
    counts: Counter[int] = field(default_factory=Counter)

    def note(self, lag: int) -> None:
        self.counts[max(lag, 0)] += 1

    def plain(self) -> dict[str, Plain]:
        """Returns `bound`, `max`, `mean` and `histogram`, the number of steps by lag."""
        steps = self.counts.total()
        mean = sum(lag * count for lag, count in self.counts.items()) / steps if steps else 0.0
        histogram: dict[str, Plain] = {str(lag): self.counts[lag] for lag in sorted(self.counts)}
        most = max(self.counts, default=0)
        return {"bound": self.bound, "max": most, "mean": mean, "histogram": histogram}


@dataclass(frozen=True)
class CommunicationMode:
    """Communication of a trainer that does not wait for the others at every step.

    Attributes:
        communication: the mode: `async`, `half_async`, `geo`, `dc_asgd`, `fl`.
        staleness: maximum age in steps of the values that a step uses.
        merge: maximum number of gradients merged into one message.
        k_steps: steps between exchanges, if trainers update locally.
        feeds: tensors that are sent but not gradients: the last one counts.
    """

    communication: str
    staleness: int
    merge: int = 1
    k_steps: int = 1
    feeds: frozenset[str] = frozenset()

    @classmethod
    def of(cls, program: Program) -> "CommunicationMode | None":
        """Reads the mode from a trainer's program; None if it waits at every step."""
        attrs = program.attrs
        mode = str(attrs.get("communication", "sync"))
        if mode == "sync":
            return None
        numbers = [attrs.get(name, 1) for name in ("staleness", "merge", "k_steps")]
        staleness, merge, k_steps = (n if isinstance(n, int) else 1 for n in numbers)
        feeds = attrs.get("feeds", ())
        assert isinstance(feeds, tuple)
        return cls(mode, staleness, merge, k_steps, frozenset(map(str, feeds)))

    @property
    def updates_here(self) -> bool:
        return self.communication in {"geo", "fl"}

    @property
    def averages_state(self) -> bool:
        """Whether an exchange averages trainers' values rather than their changes."""
        return self.communication == "fl"

    @property
    def averages(self) -> bool:
        """Whether merged gradients are averaged, and sent only when all are present."""
        return self.communication == "half_async"

    @property
    def waits(self) -> bool:
        """Whether a trainer waits for the servers' reply to its last push."""
        return self.communication in {"half_async", "dc_asgd"}

    @property
    def ahead(self) -> int:
        """Number of steps computed with the received values, beyond the next."""
        if self.updates_here:
            return self.k_steps - 1
        return self.merge - 1 if self.averages else 0


Encode: TypeAlias = Callable[[np.ndarray], tuple[Tensor, Plain]]


@dataclass
class Communicator:
    """Queue of gradients to send and of values requested.

    `send_rows` sends the queued table gradients of n steps, together with dense gradients.
    `receive` returns the servers' values, for a trainer that has sent nothing yet.
    """

    client: Client
    mode: CommunicationMode
    send_rows: Callable[[int], None] | None = None
    receive: Callable[[], dict[str, Any]] | None = None
    staleness: StalenessStats = field(init=False)
    _queue: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)  # by server and name
    _encode: dict[str, Encode] = field(default_factory=dict)  # by name
    _queued: int = 0  # steps in the queue
    _ask: Callable[[], HostRun] | None = None
    _asked: HostRun | None = None
    _newest: dict[str, Any] = field(default_factory=dict)
    _clock: int = 0  # the local values include all trainers' pushes up to this step

    def __post_init__(self) -> None:
        self.staleness = StalenessStats(self.mode.staleness)

    def restart(self, clock: int | None = None) -> None:
        """Restarts with values that the servers have at the current step.

        They include all trainers' pushes up to step `clock`, by default the current one.
        """
        self._queue.clear()
        self._queued, self._asked = 0, None
        self._clock = self.client.step if clock is None else clock
        self._newest.clear()
        self.client.restart_clock()

    def take_over(self, other: "Communicator") -> None:
        """Goes on where the communicator of another place in the job was flushed."""
        self._newest, self._clock = other._newest, other._clock  # noqa: SLF001  # of its own class
        self.staleness = other.staleness

    def begin(self) -> dict[str, Any]:
        """Waits until the next step may begin; returns the values received since the last."""
        self._take_what_came()
        if self.client.step - self._clock > self.mode.staleness:
            self.client.doing(f"waiting after step {self.client.step}")
            self.flush()
        if self.client.step - self._clock > self.mode.staleness:
            self._refresh()  # steps without gradients received no values
        lag = self.client.step - self._clock
        self.client.members.check_place(lag=lag, bound=self.mode.staleness)
        self.staleness.note(lag)
        return self.take()

    def take(self) -> dict[str, Any]:
        newest, self._newest = self._newest, {}
        return newest

    def add(self, server: int, tensor: Tensor, encode: Encode) -> None:
        queue = self._queue.setdefault(server, {})
        self._encode[tensor.name] = encode
        old = queue.get(tensor.name)
        if old is None or tensor.name in self.mode.feeds:
            queue[tensor.name] = tensor.array
        else:
            queue[tensor.name] = np.asarray(old + tensor.array)  # numpy returns a scalar for f32[]

    def end(self, ask: Callable[[], HostRun]) -> None:
        """Ends a step whose tensors were all added."""
        self._ask = ask
        self._queued += 1
        self._take_what_came()
        is_full = self._queued >= self.mode.merge or self._repeats_a_message()
        if is_full or (self._asked is None and not self.mode.averages):
            self._wait()  # one request is in flight at a time
            self._send()
        if self.mode.waits:
            self._wait()

    def flush(self) -> None:
        """Sends the queue, and waits until servers have applied all pushes."""
        self._wait()
        self._send()
        self._wait()

    def stats(self) -> dict[str, Plain]:
        return self.staleness.plain()

    def _refresh(self) -> None:
        if self._ask is not None:
            self._asked = self._ask()
            self._asked.ask()
            self._wait()
        elif self.receive is not None:
            self._newest.update(self.receive())
            self._clock = self.client.clock

    def _repeats_a_message(self) -> bool:
        """Whether a message of a former process may have ended with this step.

        Servers drop it as a whole, so it may contain nothing that they lack. Means of several steps
        end where the former ones did, sums anywhere.
        """
        client = self.client
        if self.mode.averages:
            return client.repeats_a_message()
        return client.may_repeat()

    def _send(self) -> None:
        if not self._queued or self._ask is None:
            return
        if self.send_rows is not None:
            self.send_rows(self._queued)
        parcels = PushBatcher(self.client)
        for server, arrays in self._queue.items():
            for name, array in arrays.items():
                parcels.add(server, *self._encode[name](self._merged(name, array)))
        parcels.send()
        self._queue.clear()
        self._queued = 0
        self._asked = self._ask()
        self._asked.ask()

    def _merged(self, name: str, array: np.ndarray) -> np.ndarray:
        """Returns the sum or mean of merged gradients; the last value of a feed."""
        if not self.mode.averages or self._queued == 1 or name in self.mode.feeds:
            return array
        return np.asarray(array / self._queued, array.dtype)

    def _take_what_came(self) -> None:
        if self._asked is not None and not self._asked.is_answered:
            self.client.poll()
        if self._asked is not None and self._asked.is_answered:
            self._wait()

    def _wait(self) -> None:
        if self._asked is not None:
            self._newest.update(self._asked.finish())
            self._asked = None
            self._clock = self.client.clock


@dataclass
class RelaxedRun(HostRun):
    """Runs the host operators of a trainer that does not wait for the others."""

    communicator: Communicator | None = None

    def run(self) -> None:
        client = self.host.client
        with client.spans.span("send", step=client.step):
            self._send_all()
        receives = [op for op in self.ops if op.type in {"recv", "concat"}]
        if receives:
            assert self.communicator is not None
            self.communicator.end(lambda: HostRun(self.host, receives, {}))
            self.values.update(self.communicator.take())

    def _send(self, op: Operator) -> None:
        assert self.communicator is not None
        bare = HostRun(self.host, (), {})  # holds no array of this step
        for name, server in zip(op.reads, self._servers(op), strict=True):
            tensor = Tensor(self._wire_name(name), self._on_host(name))
            self.communicator.add(server, tensor, partial(bare.encoded, op, tensor.name))
