"""What ranks compare before they run a step together, line by line."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxfleet.capture import Captured
from jaxfleet.ir import Program
from jaxfleet.ops.frames import line_of_caller
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


def warn_of_own_batches(digests: Sequence[str]) -> None:
    """Says that ranks bring different batches where each should bring the whole one.

    It may be meant, where rows are drawn at random, and so is no error.

    Args:
        digests: of what each rank brings, by rank.
    """
    if len(set(digests)) == 1:
        return
    differ = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    text = (
        f"ranks 0 and {differ} bring different batches, and of each only the rows at its own place"
        " are used; where a rank brings its own rows, say DistributedStrategy(batch='local')"
    )
    where = line_of_caller()
    if where is None:
        warnings.warn(text, stacklevel=2)
    else:
        warnings.warn_explicit(text, UserWarning, where.file, where.line)
