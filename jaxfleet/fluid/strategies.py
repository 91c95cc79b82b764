"""Regularization and clipping as plain data: what a parameter says of its training, in a file."""

from collections.abc import Mapping
from typing import Any

from jaxfleet.errors import ProgramError
from jaxfleet.fluid.clip import GradientClipByGlobalNorm, GradientClipByNorm, GradientClipByValue
from jaxfleet.fluid.error_clip import ErrorClipByValue
from jaxfleet.fluid.regularizer import L1DecayRegularizer, L2DecayRegularizer

# By name: the class, and the attribute that holds each argument.
_KINDS: Mapping[str, tuple[type[Any], Mapping[str, str]]] = {
    "l1_decay": (L1DecayRegularizer, {"regularization_coeff": "_coeff"}),
    "l2_decay": (L2DecayRegularizer, {"regularization_coeff": "_coeff"}),
    "clip_by_value": (GradientClipByValue, {"max": "max", "min": "min"}),
    "clip_by_norm": (GradientClipByNorm, {"clip_norm": "clip_norm"}),
    "clip_by_global_norm": (
        GradientClipByGlobalNorm,
        {"clip_norm": "clip_norm", "group_name": "group_name"},
    ),
    "error_clip_by_value": (ErrorClipByValue, {"max": "max", "min": "min"}),
}


def plain_strategy(strategy: Any, whose: str) -> dict[str, Any] | None:
    """Returns a strategy as plain data; None for none.

    Args:
        strategy: it.
        whose: the name of the variable, for the error.

    Raises:
        ProgramError: it is of a script's own class, or decides by a function.
    """
    if strategy is None:
        return None
    for kind, (known, arguments) in _KINDS.items():
        if type(strategy) is known and getattr(strategy, "_need_clip", None) is None:
            return {"kind": kind, **{name: getattr(strategy, at) for name, at in arguments.items()}}
    what = f"{type(strategy).__name__} of '{whose}' cannot be written as text"
    raise ProgramError(what, hint="take it off, or one of fluid's without need_clip")


def strategy_of(plain: Mapping[str, Any] | None) -> Any:
    """Returns a strategy that was plain data.

    Raises:
        ValueError: it is none.
    """
    if plain is None:
        return None
    arguments = dict(plain)
    kind = arguments.pop("kind", None)
    if kind not in _KINDS or arguments.keys() != _KINDS[kind][1].keys():
        raise ValueError(f"{dict(plain)} is no strategy")
    return _KINDS[kind][0](**arguments)
