"""Averages of parameters over steps, and optimizers that wrap another one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

from jaxfleet.errors import AssertedError, UnsupportedError
from jaxfleet.fluid import layers, unique_name
from jaxfleet.fluid.argument_checks import check_type, mistake, warn_no_effect
from jaxfleet.fluid.framework.block import Block
from jaxfleet.fluid.framework.guards import name_scope
from jaxfleet.fluid.framework.operator import Operator, OpRole
from jaxfleet.fluid.framework.program import (
    Program,
    default_main_program,
    default_startup_program,
    program_guard,
)
from jaxfleet.fluid.framework.variable import Pairs, Parameter, Variable
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.lowering.memory import keep_checkpoints
from jaxfleet.fluid.optimizer.base import Optimizer
from jaxfleet.ops.user_frames import line_of_caller

_STEPS = "@EMA_STEP_COUNTER@"
_LEAST = 1e-30  # replaces a count of zero steps as divisor


class _Runs(Protocol):
    def run(self, program: Program) -> Any: ...


class _Averages:
    """Base class of averages, with two programs that swap them in and out.

    `apply_program` saves the parameters, and overwrites them with their averages;
    `restore_program` restores the saved parameters.
    """

    def __init__(self, name: str | None) -> None:
        self._name = name or ""
        every = default_main_program().all_parameters()
        self._params = [param for param in every if param.do_model_average is not False]
        self.apply_program, self.restore_program = Program(), Program()

    @contextmanager
    def apply(self, executor: _Runs, need_restore: bool = True) -> Iterator[None]:
        """Swaps the averages in within a `with`; `need_restore` swaps them back out after it."""
        executor.run(self.apply_program)
        try:
            yield
        finally:
            if need_restore:
                self.restore(executor)

    def restore(self, executor: _Runs) -> None:
        executor.run(self.restore_program)

    def average(self, param: Parameter, block: Block) -> Variable:
        """Adds the computation of a parameter's average, and returns it."""
        what = f"{type(self).__name__} does not say what '{param.name}' averages to in {block}"
        raise NotImplementedError(what)

    def _write_programs(self) -> None:
        for param in self._params:
            kept = unique_name.generate(f"{self._name}{param.name}.kept")
            with program_guard(self.apply_program):
                block = self.apply_program.global_block()
                here, backup = block._clone_variable(param), _kept(block, kept, param)
                layers.assign(here, backup)
                layers.assign(self.average(param, block), here)
            with program_guard(self.restore_program):
                block = self.restore_program.global_block()
                layers.assign(_kept(block, kept, param), block._clone_variable(param))


def _kept(block: Block, name: str, param: Parameter) -> Variable:
    described = {"shape": list(param.shape), "dtype": param.dtype, "persistable": True}
    return block.create_var(name=name, stop_gradient=True, **described)


class ExponentialMovingAverage(_Averages):
    """Exponential moving averages of parameters, bias-corrected.

    Args:
        decay: weight of a step relative to the next; at most 1.
        thres_steps: number of steps so far, as a variable: early steps then decay faster, by
            `(1 + steps) / (10 + steps)` if that is less.
        name: prefix of the averages' names.
    """

    def __init__(
        self, decay: float = 0.999, thres_steps: Variable | None = None, name: str | None = None
    ) -> None:
        super().__init__(name)
        self._decay = self._decays(decay, thres_steps)
        helper = LayerHelper.named(_STEPS)
        self._steps = helper.global_variable(_STEPS, [1], "int64", 0)
        self._averages = {param.name: self._begun(param) for param in self._params}
        self._write_programs()

    def update(self) -> None:
        """Adds the averages' update with a step's parameters; called after `minimize`."""
        program = default_main_program()
        with program.role(OpRole.OPTIMIZE):
            counted = {"X": self._steps}
            self._steps.block.append_op("increment", counted, {"Out": self._steps}, {"step": 1.0})
        for param in self._params:
            average = self._averages[param.name]
            with name_scope("moving_average"), program.role(OpRole.OPTIMIZE):
                new = layers.elementwise_mul(param, layers.scale(self._decay, -1.0, 1.0))
                old = layers.elementwise_mul(average, self._decay)
                layers.assign(layers.elementwise_add(old, new), average)

    def average(self, param: Parameter, block: Block) -> Variable:
        steps = layers.cast(block._clone_variable(self._steps), "float32")
        power = layers.elementwise_pow(block._clone_variable(self._decay), steps)
        least = layers.fill_constant([1], "float32", _LEAST)
        counted = layers.elementwise_max(layers.scale(power, -1.0, 1.0), least)
        return layers.elementwise_div(block._clone_variable(self._averages[param.name]), counted)

    def _begun(self, param: Parameter) -> Variable:
        name = unique_name.generate(f"{self._name}{param.name}_ema")
        return LayerHelper.named(name).global_variable(name, param.shape, param.dtype, 0.0)

    def _decays(self, decay: float, thres_steps: Variable | None) -> Variable:
        name = unique_name.generate("scheduled_ema_decay_rate")
        found = LayerHelper.named(name).global_variable(name, [1], "float32", decay)
        if thres_steps is not None:
            with default_main_program().role(OpRole.LR_SCHED):
                steps = layers.cast(thres_steps, "float32")
                above, below = layers.scale(steps, 1.0, 1.0), layers.scale(steps, 1.0, 10.0)
                most = layers.fill_constant([1], "float32", decay)
                early = layers.elementwise_div(above, below)
                layers.assign(layers.elementwise_min(early, most), found)
        return found


class ModelAverage(_Averages):
    """Averages over a window of the last steps, which grows with the number of steps.

    Args:
        average_window_rate: the window's share of all steps.
        min_average_window: minimum length of the window.
        max_average_window: maximum length of the window.
        regularization: warned of: it applies to parameters, not to averages.
        name: prefix of the averages' names.
    """

    def __init__(
        self,
        average_window_rate: float,
        min_average_window: int = 10000,
        max_average_window: int = 10000,
        regularization: Any = None,
        name: str | None = None,
    ) -> None:
        if regularization is not None:
            reason = "averages are of parameters, which an optimizer has regularized"
            warn_no_effect("ModelAverage's regularization", reason)
        super().__init__(name)
        self._window = {
            "average_window": average_window_rate,
            "min_average_window": min_average_window,
            "max_average_window": max_average_window,
        }
        self._state = {param.name: self._noted(param) for param in self._params}
        self._write_programs()

    def average(self, param: Parameter, block: Block) -> Variable:
        state = [block._clone_variable(v) for v in self._state[param.name].values()]
        counts = layers.cast(layers.sums(state[3:5]), "float32")
        least = layers.fill_constant([1], "float32", _LEAST)
        return layers.elementwise_div(layers.sums(state[:3]), layers.elementwise_max(counts, least))

    def _noted(self, param: Parameter) -> dict[str, Variable]:
        """Adds the update of the sums with a step's parameter."""
        state = {}
        for name in ("sum_1", "sum_2", "sum_3"):
            state[name] = self._global(param, name, param.shape, param.dtype)
        for name in ("num_accumulates", "old_num_accumulates", "num_updates"):
            state[name] = self._global(param, name, [1], "int64")
        program = default_main_program()
        with name_scope("model_average"), program.role(OpRole.OPTIMIZE):
            program.global_block().append_op(
                "average_accumulates",
                {"param": param, **{f"in_{name}": v for name, v in state.items()}},
                {f"out_{name}": v for name, v in state.items()},
                self._window,
            )
        return state

    def _global(self, param: Parameter, name: str, shape: Any, dtype: str) -> Variable:
        made = unique_name.generate(f"{self._name}{param.name}_{name}")
        return LayerHelper.named(made).global_variable(made, shape, dtype, 0.0)


class LookaheadOptimizer:
    """Every `k` steps, moves slow copies by `alpha` towards the parameters, then resets these.

    Zhang, Lucas, Hinton and Ba, 2019. The slow copy of `w` is named `w@SLOW`.

    Raises:
        AssertionError: there is no inner optimizer, or a number is out of range.
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
        """Adds training to a program; returns the updates, and (parameter, gradient) pairs."""
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
        """1 in every k-th step, 0 in the others."""
        name = unique_name.generate("lookahead_step")
        steps = LayerHelper.named(name).global_variable(name, [1], "int32", 0)
        period = layers.fill_constant([1], "int32", self.k)
        before = layers.elementwise_floordiv(steps, period)
        steps.block.append_op("increment", {"X": steps}, {"Out": steps}, {"step": 1.0})
        after = layers.elementwise_floordiv(steps, period)
        return layers.cast(layers.elementwise_sub(after, before), "float32")


def _slow(param: Parameter) -> Variable:
    """Creates the slow copy, initialized from the parameter."""
    described = {"name": f"{param.name}@SLOW", "shape": list(param.shape), "dtype": param.dtype}
    startup = default_startup_program().global_block()
    begun = startup.create_var(**described, persistable=True)
    startup.append_op("assign", {"X": startup.var(param.name)}, {"Out": begun})
    return param.block.create_var(**described, persistable=True, stop_gradient=True)


class RecomputeOptimizer(Optimizer):
    """Keeps forward's checkpoints for backward, which recomputes the values between them.

    Chen, Xu, Zhang and Guestrin, 2016. The step's results do not change, including dropout masks;
    `jaxfleet.passes.Recompute` describes when memory is released.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        check_type(optimizer, "what a RecomputeOptimizer is made of", Optimizer)
        self._optimizer = optimizer
        self._checkpoints: list[Variable | str] | None = None

    def _set_checkpoints(self, checkpoints: list[Variable | str]) -> None:
        """Sets the values to keep: a list of variables or their names."""
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
        """Adds the wrapped optimizer's gradients, and marks the checkpoints.

        Raises:
            ValueError: no checkpoints are set, or the program does not have them.
        """
        if self._checkpoints is None:
            what = "You should call _set_checkpoints first"
            raise mistake(what, "with the variables that are kept for backward")
        keep_checkpoints(loss.block.program, self._checkpoints)
        given = (loss, startup_program, parameter_list, no_grad_set, callbacks)
        return self._optimizer.backward(*given)

    def apply_gradients(self, params_grads: Pairs) -> list[Operator]:
        """Adds the updates of the wrapped optimizer."""
        return self._optimizer.apply_gradients(params_grads)


class PipelineOptimizer:
    """Unsupported: a program in stages on several devices. Raises NotImplementedError."""

    def __init__(
        self,
        optimizer: Any,
        cut_list: Any = None,
        place_list: Any = None,
        concurrency_list: Any = None,
        queue_size: int = 30,
        sync_steps: int = 1,
        start_cpu_core_id: int = 0,
    ) -> NoReturn:
        del optimizer, cut_list, place_list, concurrency_list
        del queue_size, sync_steps, start_cpu_core_id
        what = "PipelineOptimizer: no mode here runs stages of one program on several devices"
        hint = "train by data (CompiledProgram.with_data_parallel); RecomputeOptimizer saves memory"
        raise UnsupportedError(what, source=line_of_caller(), hint=hint)
