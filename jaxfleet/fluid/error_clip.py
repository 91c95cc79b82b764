"""Error clipping: gradients of single variables, as soon as they are computed."""

from collections.abc import Mapping

from jaxfleet.fluid.block import Block
from jaxfleet.fluid.checks import check_type


class ErrorClipByValue:
    """Keeps every element of a variable's gradient between two numbers, before it goes on back.

    Args:
        max: the larger.
        min: the smaller; `-max` unless given.
    """

    def __init__(self, max: float, min: float | None = None) -> None:
        self.max, self.min = float(max), float(-max if min is None else min)

    def _append_clip_op(self, block: Block, grad_name: str) -> None:
        attrs = {"min": self.min, "max": self.max}
        block.append_op("clip", {"X": grad_name}, {"Out": grad_name}, attrs)

    def __str__(self) -> str:
        return f"ErrorClipByValue(max={self.max:g}, min={self.min:g})"


def error_clip_callback(block: Block, context: Mapping[str, str]) -> None:
    """Clips what the last operator of a block wrote, where a variable asks for it.

    Args:
        block: it.
        context: names of variables, by those of their gradients.

    Raises:
        TypeError: a variable's `error_clip` is none.
    """
    for name in block.ops[-1].output_arg_names:
        if name in context:
            clip = block._var_recursive(context[name]).error_clip
            check_type(clip, f"error_clip of '{context[name]}'", (ErrorClipByValue, type(None)))
            if clip is not None:
                clip._append_clip_op(block, name)
