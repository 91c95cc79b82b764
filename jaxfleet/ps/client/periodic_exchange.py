"""Periodic exchanges with servers, of a trainer that updates parameters itself."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jaxfleet.ir import Kind as VariableKind
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.communicator import CommunicationMode, StalenessStats
from jaxfleet.ps.client.trainer_executor import TrainerExecutor
from jaxfleet.transport.messages import Plain

_OLD = "@OLD"  # suffix: a parameter's value at the last exchange


class StateKeeper(Protocol):
    """Keeps what this trainer alone has at each exchange, for a process that takes its place."""

    @property
    def own(self) -> Collection[str]:
        """The names of the values that it keeps."""
        ...

    def begin_exchange(self, client: Client) -> None:
        """Waits until what was kept at the last exchange is safe."""
        ...

    def end_exchange(self, client: Client, values: Mapping[str, Any], trained: int) -> None:
        """Keeps values, and the number of steps that they include."""
        ...


@dataclass
class PeriodicExchange:
    """The steps of a trainer that updates parameters itself (GEO-SGD, FL), and its exchanges.

    Before an exchange that is not due, `send_rows` sends the changes of tables, whose steps count
    as complete only with those of parameters.
    """

    client: Client
    mode: CommunicationMode
    exchange: TrainerExecutor
    keeper: StateKeeper
    send_rows: Callable[[], None] | None = None
    trained: int = 0  # steps of this trainer, also those that a restored state includes
    staleness: StalenessStats = field(init=False)
    _old: dict[str, Any] = field(default_factory=dict)  # the servers' values at the last exchange
    _values: dict[str, Any] = field(default_factory=dict)  # of parameters, after the last step
    _newest: dict[str, Any] = field(default_factory=dict)
    _own: dict[str, Any] = field(default_factory=dict)  # what the keeper keeps
    _steps: int = 0  # since the last exchange
    _rows: int = 0  # trained on since the last exchange
    _clock: int = 0

    def __post_init__(self) -> None:
        is_sync = self.mode.communication == "fl"
        self.staleness = StalenessStats(self.mode.k_steps - 1 if is_sync else self.mode.staleness)
        held = self.exchange.program.of_kind(VariableKind.PARAM, VariableKind.STATE)
        self._params = tuple(v.name for v in held if v.kind is VariableKind.PARAM)
        self._olds = tuple(v.name for v in held if v.name.endswith(_OLD))

    @property
    def counts_exchanges(self) -> bool:
        """Whether the client's steps are exchanges: servers wait for all trainers at each."""
        return self.mode.communication == "fl"

    def restart(
        self, values: Mapping[str, Any], clock: int | None = None, trained: int | None = None
    ) -> None:
        """Restarts with values that the servers also have, as `Communicator.restart`.

        `trained` is the number of steps that they include, by default those so far.
        """
        if trained is not None:
            self.trained = trained
        self._old = {name: values[name.removesuffix(_OLD)] for name in self._olds}
        self._values = {name: values[name] for name in self._params}
        self._steps = self._rows = 0
        self._newest.clear()
        self.client.restart_clock()
        self._clock = self.client.step if clock is None else clock

    def take_over(self, other: "PeriodicExchange") -> None:
        """Goes on where the exchanges of another place in the job were flushed."""
        values = other._values  # noqa: SLF001  # of its own class
        if not values:
            return  # its first step was still to come
        self._values, self._old = values, other._old  # noqa: SLF001
        self._newest, self._clock = other._newest, other._clock  # noqa: SLF001
        self.staleness, self.trained = other.staleness, other.trained
        self.refresh()

    def begin(self) -> dict[str, Any]:
        """Begins a step; returns the values received since the last."""
        if not self.counts_exchanges and self.client.step - self._clock > self.mode.staleness:
            self.refresh()  # after steps without gradients
        own = self._steps if self.counts_exchanges else self.client.step - self._clock
        self.client.members.check_place(lag=own, bound=self.staleness.bound)
        self.staleness.note(own)
        return self.take()

    def take(self) -> dict[str, Any]:
        """Returns the parameters of the last exchange, if not taken yet."""
        newest, self._newest = self._newest, {}
        return newest

    def end(self, values: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """Ends a step; returns the parameters after an exchange, if one was due."""
        self._values = {name: values[name] for name in self._params}
        self._own = {name: values[name] for name in self.keeper.own}
        self._steps += 1
        self.trained += 1
        self._rows += rows
        if self._steps < self.mode.k_steps and not self.client.repeats_a_message():
            return {}
        self._meet()
        return self.take()

    def flush(self) -> None:
        if self.send_rows is not None:
            self.send_rows()
        if self._steps:
            self._meet()

    def stats(self) -> dict[str, Plain]:
        return self.staleness.plain()

    def refresh(self) -> None:
        """Receives the servers' values after the others' changes, without changes of its own."""
        self.flush()
        given = self.exchange.receive()
        for old in self._olds:
            name = old.removesuffix(_OLD)
            self._values[name] = self._values[name] + (given[name] - self._old[old])
            self._old[old] = given[name]
        self._newest = dict(self._values)
        self._clock = self.client.clock

    def _meet(self) -> None:
        if self.counts_exchanges:
            self.keeper.begin_exchange(self.client)
            self.client.next_step(0)
        self.client.doing(f"exchange after step {self.client.step}")
        held, samples = {**self._values, **self._old}, np.float32(self._rows)
        data = {v.name: samples for v in self.exchange.program.of_kind(VariableKind.DATA)}
        made, _ = self.exchange.run(held, data, {})
        self._old = {name: made[name] for name in self._olds}
        self._values = {name: made[name] for name in self._params}
        self._newest = dict(self._values)
        self._steps = self._rows = 0
        self._clock = self.client.clock
        if self.counts_exchanges:
            self.keeper.end_exchange(self.client, self._own, self.trained)
