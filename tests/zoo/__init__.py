"""A zoo of training programs for one device, the compiler's test cases.

Nothing here depends on the compiler: an entry takes the wrapper of its optimizer as an argument.
"""

from tests.zoo import (
    containers,
    control,
    dense,
    handmade,
    losses,
    metrics,
    nnx_models,
    optimizers,
    randomness,
    repeated,
    rows,
    sequence,
    sizes,
    vision,
)
from tests.zoo.base import TRAITS as TRAITS
from tests.zoo.base import Built as Built
from tests.zoo.base import Case as Case
from tests.zoo.base import Wrap as Wrap
from tests.zoo.base import identity as identity

_MODULES = (
    dense,
    vision,
    sequence,
    repeated,
    nnx_models,
    optimizers,
    randomness,
    metrics,
    losses,
    rows,
    handmade,
    control,
    containers,
    sizes,
)

ZOO: dict[str, Case] = {entry.name: entry for module in _MODULES for entry in module.CASES}
"""Every entry by its name."""

assert len(ZOO) == sum(len(module.CASES) for module in _MODULES), "zoo: a name is used twice"


def having(*traits: str) -> list[Case]:
    """Returns the entries that have all these traits."""
    return [entry for entry in ZOO.values() if entry.traits.issuperset(traits)]


def lacking(*traits: str) -> list[Case]:
    """Returns the entries that have none of these traits."""
    return [entry for entry in ZOO.values() if entry.traits.isdisjoint(traits)]
