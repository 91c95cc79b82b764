"""A trainer that updates parameters itself, and exchanges them with servers every some steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxfleet.ir import Kind
from jaxfleet.ps.client import Client
from jaxfleet.ps.lags import Lags
from jaxfleet.ps.manner import Manner
from jaxfleet.ps.messages import Plain
from jaxfleet.ps.trainer import Trainer

_OLD = "@OLD"  # what a parameter was as of the last exchange


@dataclass
class Rounds:
    """The steps of a trainer between exchanges.

    Attributes:
        client: the lines to the servers.
        manner: how often, and how, they exchange.
        exchange: the program that does it.
        lags: how old the values were that steps began with.
    """

    client: Client
    manner: Manner
    exchange: Trainer
    lags: Lags = field(init=False)
    _old: dict[str, Any] = field(default_factory=dict)  # what servers had, as of the last exchange
    _values: dict[str, Any] = field(default_factory=dict)  # of the parameters, after the last step
    _newest: dict[str, Any] = field(default_factory=dict)
    _steps: int = 0  # since the last exchange
    _rows: int = 0  # that they trained on
    _clock: int = 0

    def __post_init__(self) -> None:
        is_sync = self.manner.communication == "fl"
        self.lags = Lags(self.manner.k_steps - 1 if is_sync else self.manner.staleness)
        held = self.exchange.program.of_kind(Kind.PARAM, Kind.STATE)
        self._params = tuple(v.name for v in held if v.kind is Kind.PARAM)
        self._olds = tuple(v.name for v in held if v.name.endswith(_OLD))

    @property
    def counts_exchanges(self) -> bool:
        """Whether the client's steps are exchanges: servers wait for all trainers at each."""
        return self.manner.communication == "fl"

    def restart(self, values: Mapping[str, Any]) -> None:
        """Begins anew with values that servers have too."""
        self._old = {name: values[name.removesuffix(_OLD)] for name in self._olds}
        self._steps = self._rows = 0
        self._newest.clear()
        self.client.restart_clock()
        self._clock = self.client.step

    def begin(self) -> dict[str, Any]:
        """Begins a step; returns the values that came since the last."""
        own = self._steps if self.counts_exchanges else self.client.step - self._clock
        self.lags.note(own)
        return self.take()

    def take(self) -> dict[str, Any]:
        """Returns the parameters that an exchange gave, if they were not taken yet."""
        newest, self._newest = self._newest, {}
        return newest

    def end(self, values: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """Ends a step; returns the parameters after an exchange, if one was due."""
        self._values = {name: values[name] for name in self._params}
        self._steps += 1
        self._rows += rows
        if self._steps < self.manner.k_steps:
            return {}
        self._meet()
        return self.take()

    def flush(self) -> None:
        """Exchanges what has been done since the last exchange."""
        if self._steps:
            self._meet()

    def stats(self) -> dict[str, Plain]:
        """Returns what was counted."""
        return self.lags.plain()

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
