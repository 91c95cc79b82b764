"""Periodic exchange with servers, for a trainer that updates parameters itself: GEO-SGD, FL."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxfleet.ir import Kind
from jaxfleet.ps.client.client import Client
from jaxfleet.ps.client.communicator import CommunicationMode, StalenessStats
from jaxfleet.ps.client.trainer_executor import TrainerExecutor
from jaxfleet.transport.messages import Plain

_OLD = "@OLD"  # a parameter's value at the last exchange


@dataclass
class PeriodicExchange:
    """The local steps of a trainer between exchanges."""

    client: Client
    mode: CommunicationMode
    exchange: TrainerExecutor
    staleness: StalenessStats = field(init=False)
    _old: dict[str, Any] = field(default_factory=dict)  # the servers' values at the last exchange
    _values: dict[str, Any] = field(default_factory=dict)  # of parameters, after the last step
    _newest: dict[str, Any] = field(default_factory=dict)
    _steps: int = 0  # since the last exchange
    _rows: int = 0  # trained on since the last exchange
    _clock: int = 0

    def __post_init__(self) -> None:
        is_sync = self.mode.communication == "fl"
        self.staleness = StalenessStats(self.mode.k_steps - 1 if is_sync else self.mode.staleness)
        held = self.exchange.program.of_kind(Kind.PARAM, Kind.STATE)
        self._params = tuple(v.name for v in held if v.kind is Kind.PARAM)
        self._olds = tuple(v.name for v in held if v.name.endswith(_OLD))

    @property
    def counts_exchanges(self) -> bool:
        """Whether the client's steps are exchanges: servers wait for all trainers at each."""
        return self.mode.communication == "fl"

    def restart(self, values: Mapping[str, Any]) -> None:
        """Restarts with values that the servers also have."""
        self._old = {name: values[name.removesuffix(_OLD)] for name in self._olds}
        self._steps = self._rows = 0
        self._newest.clear()
        self.client.restart_clock()
        self._clock = self.client.step

    def begin(self) -> dict[str, Any]:
        """Begins a step; returns the values received since the last."""
        own = self._steps if self.counts_exchanges else self.client.step - self._clock
        self.staleness.note(own)
        return self.take()

    def take(self) -> dict[str, Any]:
        """Returns the parameters of the last exchange, if not taken yet."""
        newest, self._newest = self._newest, {}
        return newest

    def end(self, values: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """Ends a step; returns the parameters after an exchange, if one was due."""
        self._values = {name: values[name] for name in self._params}
        self._steps += 1
        self._rows += rows
        if self._steps < self.mode.k_steps:
            return {}
        self._meet()
        return self.take()

    def flush(self) -> None:
        if self._steps:
            self._meet()

    def stats(self) -> dict[str, Plain]:
        return self.staleness.plain()

    def _meet(self) -> None:
        if self.counts_exchanges:
            self.client.next_step(0)
        self.client.doing(f"exchange after step {self.client.step}")
        held, samples = {**self._values, **self._old}, np.float32(self._rows)
        data = {v.name: samples for v in self.exchange.program.of_kind(Kind.DATA)}
        made, _ = self.exchange.run(held, data, {})
        self._old = {name: made[name] for name in self._olds}
        self._newest = {name: made[name] for name in self._params}
        self._steps = self._rows = 0
        self._clock = self.client.clock
