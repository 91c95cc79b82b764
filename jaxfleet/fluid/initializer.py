"""First values of parameters: each adds the operator that makes them to the startup program."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxfleet.fluid.block import Block
from jaxfleet.fluid.operator import Operator
from jaxfleet.fluid.variable import Variable


class Initializer:
    """Says how a variable begins."""

    def __call__(self, variable: Variable, block: Block) -> Operator:
        """Adds the operator to a block, before the others, as fluid does."""
        op_type, attrs = self.operator(variable)
        shared = {"shape": list(variable.shape), "dtype": variable.dtype}
        return block._prepend_op(op_type, outputs={"Out": variable.name}, attrs={**shared, **attrs})

    def operator(self, variable: Variable) -> tuple[str, Mapping[str, Any]]:
        """Returns the operator's type, and its attributes besides shape and dtype."""
        raise TypeError(f"{type(self).__name__} does not say how '{variable.name}' begins")


class ConstantInitializer(Initializer):
    """Begins with one value."""

    def __init__(self, value: float = 0.0, force_cpu: bool = False) -> None:
        self._value, self._force_cpu = value, force_cpu

    def operator(self, variable: Variable) -> tuple[str, Mapping[str, Any]]:
        del variable
        return "fill_constant", {"value": float(self._value), "force_cpu": self._force_cpu}


class UniformInitializer(Initializer):
    """Draws evenly from `low` to `high`."""

    def __init__(self, low: float = -1.0, high: float = 1.0, seed: int = 0) -> None:
        self._low, self._high, self._seed = low, high, seed

    def operator(self, variable: Variable) -> tuple[str, Mapping[str, Any]]:
        del variable
        return "uniform_random", {"min": self._low, "max": self._high, "seed": self._seed}


class NormalInitializer(Initializer):
    """Draws from a normal distribution."""

    _type = "gaussian_random"

    def __init__(self, loc: float = 0.0, scale: float = 1.0, seed: int = 0) -> None:
        self._loc, self._scale, self._seed = loc, scale, seed

    def operator(self, variable: Variable) -> tuple[str, Mapping[str, Any]]:
        del variable
        return self._type, {"mean": self._loc, "std": self._scale, "seed": self._seed}


class TruncatedNormalInitializer(NormalInitializer):
    """Draws from a normal distribution, no further than two deviations."""

    _type = "truncated_gaussian_random"


class _Scaled(Initializer):
    """Draws as far as the sizes of a weight say."""

    def __init__(self, uniform: bool, seed: int) -> None:
        self._uniform, self._seed = uniform, seed

    def operator(self, variable: Variable) -> tuple[str, Mapping[str, Any]]:
        spread = self.spread(*_fans(variable.shape))
        if self._uniform:
            limit = math.sqrt(3.0) * spread
            return "uniform_random", {"min": -limit, "max": limit, "seed": self._seed}
        return "gaussian_random", {"mean": 0.0, "std": spread, "seed": self._seed}

    def spread(self, fan_in: float, fan_out: float) -> float:
        """Returns the deviation for what goes into an element and out of it."""
        raise TypeError(f"{type(self).__name__} has no spread for {fan_in} and {fan_out}")


class XavierInitializer(_Scaled):
    """Keeps the spread of values from layer to layer (Glorot and Bengio, 2010)."""

    def __init__(
        self,
        uniform: bool = True,
        fan_in: float | None = None,
        fan_out: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(uniform, seed)
        self._fan_in, self._fan_out = fan_in, fan_out

    def spread(self, fan_in: float, fan_out: float) -> float:
        into = fan_in if self._fan_in is None else self._fan_in
        out = fan_out if self._fan_out is None else self._fan_out
        return math.sqrt(2.0 / (into + out))


class MSRAInitializer(_Scaled):
    """Keeps the spread of values through rectifiers (He et al., 2015)."""

    def __init__(self, uniform: bool = True, fan_in: float | None = None, seed: int = 0) -> None:
        super().__init__(uniform, seed)
        self._fan_in = fan_in

    def spread(self, fan_in: float, fan_out: float) -> float:
        del fan_out
        return math.sqrt(2.0 / (fan_in if self._fan_in is None else self._fan_in))


class NumpyArrayInitializer(Initializer):
    """Begins with given values."""

    def __init__(self, value: np.ndarray) -> None:
        self._value = np.asarray(value)

    def operator(self, variable: Variable) -> tuple[str, Mapping[str, Any]]:
        del variable
        return "assign_value", {"values": self._value.reshape(-1).tolist()}


def _fans(shape: tuple[int, ...]) -> tuple[float, float]:
    """Returns how many elements go into one, and how many it goes into."""
    if len(shape) < 2:
        only = float(shape[0]) if shape else 1.0
        return only, only
    if len(shape) == 2:
        return float(shape[0]), float(shape[1])
    field = math.prod(shape[2:])
    return float(shape[1] * field), float(shape[0] * field)


Constant, Uniform, Normal = ConstantInitializer, UniformInitializer, NormalInitializer
TruncatedNormal, Xavier, MSRA = TruncatedNormalInitializer, XavierInitializer, MSRAInitializer
