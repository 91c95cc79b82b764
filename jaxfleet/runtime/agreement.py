"""What ranks compare before they run a step together, line by line."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxfleet.capture import Captured
from jaxfleet.ir import Program
from jaxfleet.runtime.strategy import DistributedStrategy

# A rank may be less patient than others; what an outer optimizer does is in the program.
_OWN = {"lost_after_s", "step_timeout_s", "connect_s", "outer"}


def description(
    strategy: DistributedStrategy, captured: Captured, program: Program, data: Sequence[Any]
) -> list[str]:
    """Returns the lines that must be the same on all ranks.

    Args:
        strategy: how the step is distributed.
        captured: the one-device step.
        program: the transpiled one.
        data: what this rank brings as the batch.
    """
    fields = dataclasses.fields(strategy)
    names = [leaf.name for leaf in captured.signature.batch]
    return [
        f"jax {jax.__version__}",
        *(
            f"strategy: {x.name}={getattr(strategy, x.name)!r}"
            for x in fields
            if x.name not in _OWN
        ),
        *(f"batch: {n} {list(np.shape(x))}" for n, x in zip(names, data, strict=True)),
        *str(program).splitlines(),
    ]
