"""LookaheadOptimizer: slow copies of the parameters, towards which the fast ones are drawn back."""

from collections.abc import Sequence
from typing import Any

from jaxfleet.errors import AssertedError
from jaxfleet.fluid import layers, unique_name
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.operator import Operator
from jaxfleet.fluid.optimizer.base import Optimizer
from jaxfleet.fluid.program import default_startup_program, program_guard
from jaxfleet.fluid.roles import OpRole
from jaxfleet.fluid.variable import Pairs, Parameter, Variable


class LookaheadOptimizer:
    """Every `k` steps, slow copies go `alpha` of the way to the parameters, which follow them.

    Zhang, Lucas, Hinton and Ba, 2019. A parameter's slow copy is called `w@SLOW`.

    Args:
        inner_optimizer: what updates the parameters.
        alpha: from 0 to 1.
        k: at least 1.

    Raises:
        AssertionError: there is no inner optimizer, or a number is outside its range.
    """

    def __init__(self, inner_optimizer: Optimizer, alpha: float = 0.5, k: int = 5) -> None:
        if inner_optimizer is None:
            raise AssertedError("LookaheadOptimizer: there is no inner optimizer")
        if not 0.0 <= alpha <= 1.0:
            raise AssertedError(f"LookaheadOptimizer: alpha is {alpha}", hint="it is from 0 to 1")
        if not isinstance(k, int) or k < 1:
            raise AssertedError(f"LookaheadOptimizer: k is {k!r}", hint="it is 1 or more")
        self.inner_optimizer, self.alpha, self.k, self.type = inner_optimizer, alpha, k, "lookahead"

    def minimize(self, loss: Variable, startup_program: Any = None) -> tuple[list[Operator], Pairs]:
        """Adds what trains the program; returns the updates, and parameters with gradients."""
        made = self.inner_optimizer.minimize(loss, startup_program=startup_program)
        program = loss.block.program
        startup = startup_program or default_startup_program()
        with program_guard(program, startup), program.role(OpRole.OPTIMIZE):
            self._draw_back([param for param, _ in made[1]])
        return made

    def _draw_back(self, params: Sequence[Parameter]) -> None:
        turn = self._turn()
        stay = layers.scale(turn, -1.0, 1.0)
        for param in params:
            slow = _slow(param)
            towards = layers.scale(layers.elementwise_sub(param, slow), self.alpha)
            new = layers.elementwise_mul(layers.elementwise_add(slow, towards), turn)
            for variable in (slow, param):
                old = layers.elementwise_mul(variable, stay)
                layers.assign(layers.elementwise_add(old, new), variable)

    def _turn(self) -> Variable:
        """Returns 1 in every k-th step, 0 in the others."""
        name = unique_name.generate("lookahead_step")
        steps = LayerHelper.named(name).global_variable(name, [1], "int32", 0)
        period = layers.fill_constant([1], "int32", self.k)
        before = layers.elementwise_floordiv(steps, period)
        steps.block.append_op("increment", {"X": steps}, {"Out": steps}, {"step": 1.0})
        after = layers.elementwise_floordiv(steps, period)
        return layers.cast(layers.elementwise_sub(after, before), "float32")


def _slow(param: Parameter) -> Variable:
    """Makes the slow copy, which begins as the parameter does."""
    described = {"name": f"{param.name}@SLOW", "shape": list(param.shape), "dtype": param.dtype}
    startup = default_startup_program().global_block()
    begun = startup.create_var(**described, persistable=True)
    startup.append_op("assign", {"X": startup.var(param.name)}, {"Out": begun})
    return param.block.create_var(**described, persistable=True, stop_gradient=True)
