"""RecomputeOptimizer: backward begins with some values of forward, and computes the rest again."""

from collections.abc import Sequence
from typing import Any

from jaxfleet.fluid.checks import check_type, mistake
from jaxfleet.fluid.operator import Operator
from jaxfleet.fluid.optimizer.base import Optimizer
from jaxfleet.fluid.program import Program
from jaxfleet.fluid.recomputing import keep_checkpoints
from jaxfleet.fluid.variable import Pairs, Variable


class RecomputeOptimizer(Optimizer):
    """Keeps the checkpoints of forward for backward, which computes again what lies between.

    Chen, Xu, Zhang and Guestrin, 2016. What the step computes stays the same, masks of dropout
    included; `jaxfleet.passes.Recompute` says how memory is let go.

    Args:
        optimizer: what updates the parameters.

    Raises:
        TypeError: it is no optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        check_type(optimizer, "what a RecomputeOptimizer is made of", Optimizer)
        self._optimizer = optimizer
        self._checkpoints: list[Variable | str] | None = None

    def _set_checkpoints(self, checkpoints: list[Variable | str]) -> None:
        """Says which values are kept: variables or their names.

        Raises:
            TypeError: it is no list, or of something else.
        """
        check_type(checkpoints, "checkpoints", list)
        for one in checkpoints:
            check_type(one, "a checkpoint", (Variable, str))
        self._checkpoints = checkpoints

    def backward(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Any = None,
        no_grad_set: Any = None,
        callbacks: Sequence[Any] | None = None,
    ) -> Pairs:
        """Adds the gradients as the optimizer does, and says what they begin with.

        Raises:
            ValueError: nobody said which values are kept, or the program has no such.
        """
        if self._checkpoints is None:
            what = "You should call _set_checkpoints first"
            raise mistake(what, "with the variables that are kept for backward")
        keep_checkpoints(loss.block.program, self._checkpoints)
        given = (loss, startup_program, parameter_list, no_grad_set, callbacks)
        return self._optimizer.backward(*given)

    def apply_gradients(self, params_grads: Pairs) -> list[Operator]:
        """Adds the updates, as the optimizer does."""
        return self._optimizer.apply_gradients(params_grads)
