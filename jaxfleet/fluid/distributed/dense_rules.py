"""How servers update dense tables: by the three rules that descriptions name.

`adam` is pslib's, which is Adam's first average over Adagrad's sum, both decaying::

    d = ada_decay_rate * d + 1
    s = ada_decay_rate * s + g * g
    v = mom_decay_rate * v + (1 - mom_decay_rate) * g
    w -= learning_rate * sqrt((d + d * ada_epsilon) / (s + d * ada_epsilon)) * v

so that a step is `learning_rate` where gradients stay alike, whatever their size. `naive` is plain
descent, and `summary` what data_norm counts: `w = summary_decay_rate * w + g`.
"""

from typing import Protocol

import numpy as np

from jaxfleet.errors import ProgramError
from jaxfleet.fluid.distributed.descriptions import (
    AdamSGDParameter,
    DenseSGDRuleParameter,
    NaiveSGDParameter,
    SummarySGDParameter,
)


class DenseRule(Protocol):
    """Updates a table, and keeps what it needs for that."""

    def update(self, values: np.ndarray, grads: np.ndarray) -> None:
        """Updates values in place.

        Args:
            values: float32[n], all of the table.
            grads: float32[n].
        """
        ...


class Adam:
    """pslib's Adam.

    Args:
        said: its numbers.
        size: of the table.
    """

    def __init__(self, said: AdamSGDParameter, size: int) -> None:
        self._rate = np.float32(_said(said.learning_rate, "adam.learning_rate"))
        self._keep = np.float32(_said(said.ada_decay_rate, "adam.ada_decay_rate"))
        self._speed_kept = np.float32(_said(said.mom_decay_rate, "adam.mom_decay_rate"))
        self._epsilon = np.float32(_said(said.ada_epsilon, "adam.ada_epsilon"))
        self._steps = np.float32(0)
        self._squares = np.zeros(size, np.float32)
        self._speed = np.zeros(size, np.float32)

    def update(self, values: np.ndarray, grads: np.ndarray) -> None:
        one = np.float32(1)
        self._steps = self._keep * self._steps + one
        self._squares *= self._keep
        self._squares += grads * grads
        self._speed *= self._speed_kept
        self._speed += (one - self._speed_kept) * grads
        least = self._steps * self._epsilon
        values -= (
            self._rate * np.sqrt((self._steps + least) / (self._squares + least)) * self._speed
        )


class Naive:
    """Plain descent."""

    def __init__(self, said: NaiveSGDParameter) -> None:
        self._rate = np.float32(_said(said.learning_rate, "naive.learning_rate"))

    def update(self, values: np.ndarray, grads: np.ndarray) -> None:
        values -= self._rate * grads


class Summary:
    """Adds to what decays."""

    def __init__(self, said: SummarySGDParameter) -> None:
        self._keep = np.float32(_said(said.summary_decay_rate, "summary.summary_decay_rate"))

    def update(self, values: np.ndarray, grads: np.ndarray) -> None:
        values *= self._keep
        values += grads


def dense_rule(said: DenseSGDRuleParameter | None, size: int) -> DenseRule:
    """Returns the rule that a table's description names.

    Raises:
        ProgramError: it names none, or does not say its numbers.
    """
    match said:
        case DenseSGDRuleParameter(name="adam", adam=AdamSGDParameter() as adam):
            return Adam(adam, size)
        case DenseSGDRuleParameter(name="naive", naive=NaiveSGDParameter() as naive):
            return Naive(naive)
        case DenseSGDRuleParameter(name="summary", summary=SummarySGDParameter() as summary):
            return Summary(summary)
    what = f"a dense table is updated by {said.name if said else None!r}, of which nothing is said"
    raise ProgramError(what, hint="adam, naive and summary are there, each with its numbers")


def _said(number: float | None, name: str) -> float:
    if number is None:
        raise ProgramError(f"a dense table's description does not say {name}")
    return number
