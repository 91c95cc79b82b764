"""Gradient clipping: operators between the gradients and the updates."""

from collections.abc import Callable

from jaxfleet.fluid import layers
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.roles import OpRole
from jaxfleet.fluid.variable import Parameter, Variable

Pairs = list[tuple[Parameter, Variable]]


class GradientClipBase:
    """One way to clip.

    Args:
        need_clip: tells of a parameter whether its gradient is clipped; all are unless given.
    """

    def __init__(self, need_clip: Callable[[Parameter], bool] | None = None) -> None:
        self._need_clip = need_clip or (lambda _: True)

    def __call__(self, pairs: Pairs) -> Pairs:
        """Adds the operators, and returns parameters with their clipped gradients."""
        clipped = [(p, g) for p, g in pairs if self._need_clip(p)]
        made = dict(zip((p.name for p, _ in clipped), self.clip(clipped), strict=True))
        return [(p, made.get(p.name, g)) for p, g in pairs]

    def clip(self, pairs: Pairs) -> list[Variable]:
        """Returns the clipped gradients."""
        return [self.clip_one(p, g) for p, g in pairs]

    def clip_one(self, param: Parameter, grad: Variable) -> Variable:
        """Returns a clipped gradient."""
        raise TypeError(f"{type(self).__name__} does not say how '{grad.name}' of {param} is cut")


class GradientClipByValue(GradientClipBase):
    """Keeps every element between two numbers.

    Args:
        max: the larger.
        min: the smaller; `-max` unless given.
        need_clip: tells of a parameter whether its gradient is clipped.
    """

    def __init__(
        self,
        max: float,
        min: float | None = None,
        need_clip: Callable[[Parameter], bool] | None = None,
    ) -> None:
        super().__init__(need_clip)
        self._max, self._min = float(max), float(-max if min is None else min)

    def clip_one(self, param: Parameter, grad: Variable) -> Variable:
        with grad.block.program.role(OpRole.OPTIMIZE, [param.name, grad.name]):
            return layers.clip(grad, self._min, self._max)


class GradientClipByGlobalNorm(GradientClipBase):
    """Scales all gradients together so that their norm is no larger than a number.

    Args:
        clip_norm: the number.
        group_name: which gradients go together.
        need_clip: tells of a parameter whether its gradient is clipped.
    """

    def __init__(
        self,
        clip_norm: float,
        group_name: str = "default_group",
        need_clip: Callable[[Parameter], bool] | None = None,
    ) -> None:
        super().__init__(need_clip)
        self._norm, self._group = float(clip_norm), group_name

    def clip(self, pairs: Pairs) -> list[Variable]:
        if not pairs:
            return []
        program = pairs[0][1].block.program
        with program.role(OpRole.OPTIMIZE):
            squares = [layers.reduce_sum(layers.square(grad)) for _, grad in pairs]
            norm = layers.sqrt(layers.sums(squares))
            limit = layers.fill_constant([1], norm.dtype, self._norm)
            factor = layers.elementwise_div(limit, layers.elementwise_max(limit, norm))
        return [self._scaled(param, grad, factor) for param, grad in pairs]

    def _scaled(self, param: Parameter, grad: Variable, factor: Variable) -> Variable:
        with grad.block.program.role(OpRole.OPTIMIZE, [param.name, grad.name]):
            helper = LayerHelper("elementwise_mul")
            out = helper.output(grad.dtype)
            helper.append_op("elementwise_mul", {"X": grad, "Y": factor}, {"Out": out})
            return out


class GradientClipByNorm(GradientClipBase):
    """Scales each gradient so that its norm is no larger than a number.

    Args:
        clip_norm: the number.
        need_clip: tells of a parameter whether its gradient is clipped.
    """

    def __init__(
        self, clip_norm: float, need_clip: Callable[[Parameter], bool] | None = None
    ) -> None:
        super().__init__(need_clip)
        self._norm = float(clip_norm)

    def clip_one(self, param: Parameter, grad: Variable) -> Variable:
        with grad.block.program.role(OpRole.OPTIMIZE, [param.name, grad.name]):
            helper = LayerHelper("clip_by_norm")
            out = helper.output(grad.dtype)
            helper.append_op("clip_by_norm", {"X": grad}, {"Out": out}, {"max_norm": self._norm})
            return out
