"""Initializers: each adds the operator for a parameter's initial value to the startup program."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxfleet.fluid.argument_checks import check_type, mistake
from jaxfleet.fluid.framework.block import Block
from jaxfleet.fluid.framework.operator import Operator
from jaxfleet.fluid.framework.variable import Variable


class Initializer:
    """How a variable is initialized."""

    def __call__(self, variable: Variable, block: Block) -> Operator:
        """Inserts the operator at the start of a block, as fluid does."""
        op_type, attrs = self.operator(variable)
        shared = {"shape": list(variable.shape), "dtype": variable.dtype}
        return block._prepend_op(op_type, outputs={"Out": variable.name}, attrs={**shared, **attrs})

    def operator(self, variable: Variable) -> tuple[str, Mapping[str, Any]]:
        """Returns the operator's type, and its attributes other than shape and dtype."""
        raise TypeError(f"{type(self).__name__} does not say how '{variable.name}' begins")


class ConstantInitializer(Initializer):
    """Fills with one value."""

    def __init__(self, value: float = 0.0, force_cpu: bool = False) -> None:
        self._value, self._force_cpu = value, force_cpu

    def operator(self, variable: Variable) -> tuple[str, Mapping[str, Any]]:
        del variable
        return "fill_constant", {"value": float(self._value), "force_cpu": self._force_cpu}


class UniformInitializer(Initializer):
    """Draws uniformly from `low` to `high`.

    Args:
        low: the lower bound.
        high: the upper bound.
        seed: of the random numbers; the program's unless given.
        diag_num: the number of rows whose diagonal element is set.
        diag_step: the distance of these elements minus one.
        diag_val: their value.
    """

    def __init__(
        self,
        low: float = -1.0,
        high: float = 1.0,
        seed: int = 0,
        diag_num: int = 0,
        diag_step: int = 0,
        diag_val: float = 1.0,
    ) -> None:
        self._attrs = {"min": float(low), "max": float(high), "seed": seed}
        self._attrs |= {"diag_num": diag_num, "diag_step": diag_step, "diag_val": diag_val}

    def operator(self, variable: Variable) -> tuple[str, Mapping[str, Any]]:
        del variable
        return "uniform_random", self._attrs


class NormalInitializer(Initializer):
    """Draws from a normal distribution."""

    _type = "gaussian_random"

    def __init__(self, loc: float = 0.0, scale: float = 1.0, seed: int = 0) -> None:
        self._loc, self._scale, self._seed = loc, scale, seed

    def operator(self, variable: Variable) -> tuple[str, Mapping[str, Any]]:
        del variable
        return self._type, {"mean": self._loc, "std": self._scale, "seed": self._seed}


class TruncatedNormalInitializer(NormalInitializer):
    """Draws from a normal distribution truncated at two standard deviations."""

    _type = "truncated_gaussian_random"


class _Scaled(Initializer):
    """Draws with a spread that depends on the sizes of a weight."""

    def __init__(self, uniform: bool, seed: int) -> None:
        self._uniform, self._seed = uniform, seed

    def operator(self, variable: Variable) -> tuple[str, Mapping[str, Any]]:
        spread = self.spread(*_fans(variable.shape))
        if self._uniform:
            limit = math.sqrt(3.0) * spread
            return "uniform_random", {"min": -limit, "max": limit, "seed": self._seed}
        return "gaussian_random", {"mean": 0.0, "std": spread, "seed": self._seed}

    def spread(self, fan_in: float, fan_out: float) -> float:
        """Returns the standard deviation for given numbers of inputs and outputs."""
        raise TypeError(f"{type(self).__name__} has no spread for {fan_in} and {fan_out}")


class XavierInitializer(_Scaled):
    """Keeps the variance of values from layer to layer (Glorot and Bengio, 2010)."""

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
    """Keeps the variance of values through rectifiers (He et al., 2015)."""

    def __init__(self, uniform: bool = True, fan_in: float | None = None, seed: int = 0) -> None:
        super().__init__(uniform, seed)
        self._fan_in = fan_in

    def spread(self, fan_in: float, fan_out: float) -> float:
        del fan_out
        return math.sqrt(2.0 / (fan_in if self._fan_in is None else self._fan_in))


class BilinearInitializer(Initializer):
    """Filters for upsampling by linear interpolation, for `conv2d_transpose`."""

    def operator(self, variable: Variable) -> tuple[str, Mapping[str, Any]]:
        shape = variable.shape
        if len(shape) != 4 or shape[2] != shape[3]:
            what = f"filters to enlarge images are [out, in, n, n], and '{variable.name}' is"
            raise mistake(f"{what} {list(shape)}")
        half = math.ceil(shape[3] / 2)
        center = (2 * half - 1 - half % 2) / (2 * half)
        line = 1 - np.abs(np.arange(shape[3]) / half - center)
        filters = np.broadcast_to(np.outer(line, line), shape)
        return "assign_value", {"values": filters.reshape(-1).tolist()}


class NumpyArrayInitializer(Initializer):
    """Fills with given values."""

    def __init__(self, value: np.ndarray) -> None:
        check_type(value, "the value of a NumpyArrayInitializer", np.ndarray)
        self._value = value

    def operator(self, variable: Variable) -> tuple[str, Mapping[str, Any]]:
        if self._value.size != math.prod(variable.shape):
            what = f"'{variable.name}' is {list(variable.shape)}, and begins with"
            raise mistake(f"{what} an array {list(self._value.shape)}")
        return "assign_value", {"values": self._value.reshape(-1).tolist()}


def _fans(shape: tuple[int, ...]) -> tuple[float, float]:
    """Returns the numbers of inputs and outputs of a weight."""
    if len(shape) < 2:
        only = float(shape[0]) if shape else 1.0
        return only, only
    if len(shape) == 2:
        return float(shape[0]), float(shape[1])
    field = math.prod(shape[2:])
    return float(shape[1] * field), float(shape[0] * field)


Constant, Uniform, Normal = ConstantInitializer, UniformInitializer, NormalInitializer
TruncatedNormal, Xavier, MSRA = TruncatedNormalInitializer, XavierInitializer, MSRAInitializer
Bilinear = BilinearInitializer
