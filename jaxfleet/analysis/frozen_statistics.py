"""Running statistics that a training step reads and never updates: BatchNorm left in evaluation."""

import re

from jaxfleet.ir import Kind, Operator, Program

_STATISTICS = frozenset({"mean", "var"})
_NORMALIZES = re.compile(r"norm|batch_stats|(^|/)bn|bn(_?\d+)?(/|$)", re.IGNORECASE)
_WRAPPERS = frozenset({"value", "raw_value"})  # what NNX puts around an array


def frozen_statistics_warning(program: Program) -> str | None:
    """Text of a warning about normalization that runs on its running statistics; None if none does.

    What marks running statistics is a pair of leaves of the state named `mean` and `var`, side by
    side, of a layer whose path names a normalization, that forward reads. Flax's linen and NNX
    name theirs so, and a layer that was forgotten in evaluation mode trains on the statistics of
    its first day. A scaler of features, whose statistics stay as they are, is not meant.

    Args:
        program: a captured training step.
    """
    ops = [op for block in program.blocks for op in block.ops]
    written = {name for op in ops for name in op.writes}
    if not any(variable.name in written for variable in program.of_kind(Kind.PARAM)):
        return None
    layers: dict[str, dict[str, str]] = {}
    for variable in program.of_kind(Kind.STATE):
        *parents, leaf = [part for part in variable.name.split("/") if part not in _WRAPPERS]
        if leaf in _STATISTICS and variable.name not in written:
            layers.setdefault("/".join(parents), {})[leaf] = variable.name
    pairs = {
        layer: pair
        for layer, pair in layers.items()
        if pair.keys() == _STATISTICS and _NORMALIZES.search(layer) is not None
    }
    readers = {layer: _reader(ops, pair["mean"]) for layer, pair in pairs.items()}
    found = {layer: op for layer, op in readers.items() if op is not None}
    if not found:
        return None
    layer, op = next(iter(found.items()))
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    where = f" ({place})" if (place := op.source.place()) else ""
    return (
        f"'{layer}/mean' and '{layer}/var'{others} are read{where} and never updated: the "
        "normalization uses its running statistics, as in evaluation. To train on the batch's, "
        "apply a linen model with train=True and mutable=['batch_stats'], call model.train() on an "
        "NNX model, and return the new statistics in the state. Where it is meant so, keep them "
        "out of the state: let the step close over them"
    )


def _reader(ops: list[Operator], name: str) -> Operator | None:
    return next((op for op in ops if op.role.is_forward and name in op.reads), None)
