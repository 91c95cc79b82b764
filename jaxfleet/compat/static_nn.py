"""`paddle.static.nn`: layers whose arguments have other names in the later documents."""

from collections.abc import Sequence
from typing import Any

from jaxfleet.fluid import Variable, layers
from jaxfleet.fluid import embedding as embedding


def fc(
    x: Variable | Sequence[Variable],
    size: int,
    num_flatten_dims: int = 1,
    weight_attr: Any = None,
    bias_attr: Any = None,
    activation: str | None = None,
    name: str | None = None,
) -> Variable:
    """Multiplies by a matrix and adds a bias: `fluid.layers.fc`."""
    return layers.fc(x, size, num_flatten_dims, weight_attr, bias_attr, activation, name)
