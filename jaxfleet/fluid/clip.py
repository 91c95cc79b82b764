"""Clipping of gradients before updates, and of single variables' gradients in backward."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence

from jaxfleet.errors import WrongTypeError
from jaxfleet.fluid import layers
from jaxfleet.fluid.argument_checks import check_type, mistake, number
from jaxfleet.fluid.framework.block import Block
from jaxfleet.fluid.framework.guards import name_scope
from jaxfleet.fluid.framework.operator import NAME_SCOPE, ROLE_VAR
from jaxfleet.fluid.framework.program import Program, default_main_program
from jaxfleet.fluid.framework.types import VarType
from jaxfleet.fluid.framework.variable import Pairs, Parameter, Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.ir.naming import CLIP_MARK


class ErrorClipByValue:
    """Clips the elements of a variable's gradient before it propagates further.

    `min` is `-max` unless given.
    """

    def __init__(self, max: float, min: float | None = None) -> None:
        self.max, self.min = float(max), float(-max if min is None else min)

    def _append_clip_op(self, block: Block, grad_name: str) -> None:
        attrs = {"min": self.min, "max": self.max}
        block.append_op("clip", {"X": grad_name}, {"Out": grad_name}, attrs)

    def __str__(self) -> str:
        return f"ErrorClipByValue(max={self.max:g}, min={self.min:g})"


def error_clip_callback(block: Block, context: Mapping[str, str]) -> None:
    """Clips the outputs of a block's last operator for variables with an `error_clip`.

    `context` has the names of variables, by the names of their gradients.
    """
    for name in block.ops[-1].output_arg_names:
        if name in context:
            clip = block._var_recursive(context[name]).error_clip
            check_type(clip, f"error_clip of '{context[name]}'", (ErrorClipByValue, type(None)))
            if clip is not None:
                clip._append_clip_op(block, name)


SCOPE = "gradient_clip"
ON_TRAINERS = f"{SCOPE}_{CLIP_MARK}"


class GradientClipBase:
    """Base of the clipping strategies.

    `need_clip` maps a parameter to whether its gradient is clipped; all are unless given. Raises
    TypeError if it is not callable.
    """

    def __init__(self, need_clip: Callable[[Parameter], bool] | None = None) -> None:
        if need_clip is not None and not callable(need_clip):
            what = f"need_clip is a function of a parameter, not {need_clip!r}"
            raise mistake(what, kind=WrongTypeError)
        self._need_clip = need_clip

    def __call__(self, params_grads: Pairs) -> Pairs:
        with name_scope(SCOPE):
            return _replaced(params_grads, self._of(params_grads))

    def _of(self, pairs: Pairs) -> dict[str, Variable]:
        wanted = [(p, g) for p, g in pairs if self._wants(p)]
        made = self.clip(wanted)
        return {p.name: clipped for (p, _), clipped in zip(wanted, made, strict=True)}

    def _wants(self, param: Parameter) -> bool:
        return param.need_clip and (self._need_clip is None or self._need_clip(param))

    def clip(self, pairs: Pairs) -> list[Variable]:
        return [self.clip_one(p, g) for p, g in pairs]

    def clip_one(self, param: Parameter, grad: Variable) -> Variable:
        raise TypeError(f"{type(self).__name__} does not say how '{grad.name}' of {param} is cut")

    def same_group(self, other: "GradientClipBase") -> bool:
        """Whether gradients with this strategy and with another are clipped together."""
        return other is self


class GradientClipByValue(GradientClipBase):
    """Clips every element to an interval; `min` is `-max` unless given."""

    def __init__(
        self,
        max: float,
        min: float | None = None,
        need_clip: Callable[[Parameter], bool] | None = None,
    ) -> None:
        super().__init__(need_clip)
        self.max = number(max, "'max' of a gradient clip")
        self.min = -self.max if min is None else number(min, "'min' of a gradient clip")

    def clip_one(self, param: Parameter, grad: Variable) -> Variable:
        with grad.block.program._optimized_guard([param, grad]):
            return _like(grad, layers.clip(grad, self.min, self.max))

    def __str__(self) -> str:
        return f"GradientClipByValue(max={self.max:g}, min={self.min:g})"


class GradientClipByNorm(GradientClipBase):
    """Scales each gradient down to a maximum norm, `clip_norm`."""

    def __init__(
        self, clip_norm: float, need_clip: Callable[[Parameter], bool] | None = None
    ) -> None:
        super().__init__(need_clip)
        self.clip_norm = number(clip_norm, "'clip_norm' of a gradient clip")

    def clip_one(self, param: Parameter, grad: Variable) -> Variable:
        with grad.block.program._optimized_guard([param, grad]):
            helper = LayerHelper("clip_by_norm")
            out = helper.output(grad.dtype)
            attrs = {"max_norm": self.clip_norm}
            helper.append_op("clip_by_norm", {"X": grad}, {"Out": out}, attrs)
            return _like(grad, out)

    def __str__(self) -> str:
        return f"GradientClipByNorm({self.clip_norm:g})"


class GradientClipByGlobalNorm(GradientClipBase):
    """Scales gradients together down to a maximum global norm, `clip_norm`.

    `group_name` is the group of gradients, if `set_gradient_clip` defines several.
    """

    def __init__(
        self,
        clip_norm: float,
        group_name: str = "default_group",
        need_clip: Callable[[Parameter], bool] | None = None,
    ) -> None:
        super().__init__(need_clip)
        self.clip_norm = number(clip_norm, "'clip_norm' of a gradient clip")
        self.group_name = group_name

    def clip(self, pairs: Pairs) -> list[Variable]:
        if not pairs:
            return []
        squares = []
        for param, grad in pairs:
            with grad.block.program._optimized_guard([param, grad]):
                squares.append(layers.reduce_sum(layers.square(_whole(grad))))
        with pairs[-1][1].block.program._optimized_guard(pairs[-1]):
            norm = layers.sqrt(layers.sums(squares))
            limit = layers.fill_constant([1], norm.dtype, self.clip_norm)
            factor = layers.elementwise_div(limit, layers.elementwise_max(limit, norm))
        return [self._scaled(param, grad, factor) for param, grad in pairs]

    def _scaled(self, param: Parameter, grad: Variable, factor: Variable) -> Variable:
        with grad.block.program._optimized_guard([param, grad]):
            return _like(grad, layers.elementwise_mul(grad, factor))

    def same_group(self, other: GradientClipBase) -> bool:
        if not isinstance(other, GradientClipByGlobalNorm) or other.group_name != self.group_name:
            return False
        if other.clip_norm != self.clip_norm:
            norms = f"{self.clip_norm:g} and {other.clip_norm:g}"
            what = (
                f"gradients of group '{self.group_name}' have one norm, and are clipped by {norms}"
            )
            raise mistake(what, "give one of them another group_name")
        return True

    def __str__(self) -> str:
        return f"GradientClipByGlobalNorm({self.clip_norm:g}, {self.group_name!r})"


def set_gradient_clip(
    clip: GradientClipBase,
    param_list: Sequence[Parameter | str] | None = None,
    program: Program | None = None,
) -> None:
    """Sets how the gradients of parameters are clipped, for optimizers without `grad_clip`.

    Args:
        clip: the clipping strategy.
        param_list: parameters or their names; all of the program unless given.
        program: the program of the parameters; the default main program unless given.

    Raises:
        TypeError: `clip` is not a clipping strategy, or the list has an item of another type.
    """
    check_type(clip, "clip", GradientClipBase)
    block = (program or default_main_program()).global_block()
    if any("optimizer" in (op.attr(NAME_SCOPE) or "") for op in block.ops):
        what = "set_gradient_clip comes after minimize, and does nothing for what was minimized"
        warnings.warn(what, stacklevel=2)
    for given in block.all_parameters() if param_list is None else param_list:
        param = block.var(given) if isinstance(given, str) else given
        check_type(param, "a member of param_list", Parameter)
        param.gradient_clip_attr = copy.deepcopy(clip)  # type: ignore[attr-defined]  # checked


def append_gradient_clip_ops(params_grads: Pairs) -> Pairs:
    """Clips the gradients of parameters with a `set_gradient_clip`, each by its own strategy.

    Raises ValueError if gradients of one group have different norms.
    """
    groups: list[tuple[GradientClipBase, Pairs]] = []
    for param, grad in params_grads:
        clip = param.gradient_clip_attr
        if clip is None:
            continue
        check_type(clip, f"gradient_clip_attr of '{param.name}'", GradientClipBase)
        found = next((pairs for known, pairs in groups if known.same_group(clip)), None)
        if found is None:
            groups.append((clip, [(param, grad)]))
        else:
            found.append((param, grad))
    made: dict[str, Variable] = {}
    if groups:
        with name_scope(ON_TRAINERS):
            for clip, pairs in groups:
                made |= clip._of(pairs)
    return _replaced(params_grads, made)


def _replaced(pairs: Pairs, clipped: Mapping[str, Variable]) -> Pairs:
    """Replaces the gradients by clipped ones, and updates the role variables of clip operators."""
    made = {(param.name, grad.name): clipped.get(param.name) for param, grad in pairs}
    for op in pairs[0][0].block.program.global_block().ops if clipped else ():
        new = made.get(tuple(op.attr(ROLE_VAR) or ()))
        if new is not None and SCOPE in op.attr(NAME_SCOPE):
            op._set_attr(ROLE_VAR, [op.attr(ROLE_VAR)[0], new.name])
    return [(param, clipped.get(param.name, grad)) for param, grad in pairs]


def _whole(grad: Variable) -> Variable:
    """Converts a gradient of rows to an array."""
    if grad.type != VarType.SELECTED_ROWS:
        return grad
    merged = _like(grad, _made("merge_selected_rows", grad))
    return _made("get_tensor_from_selected_rows", merged)


def _made(op_type: str, x: Variable) -> Variable:
    helper = LayerHelper(op_type)
    out = helper.output(x.dtype)
    helper.append_op(op_type, {"X": x}, {"Out": out})
    return out


def _like(grad: Variable, made: Variable) -> Variable:
    """Marks a clipped gradient as rows if the original is of rows."""
    made.type = grad.type
    return made
