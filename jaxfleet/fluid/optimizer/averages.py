"""Averages of parameters over the steps, which take their place while a model is tested."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from jaxfleet.fluid import layers, unique_name
from jaxfleet.fluid.block import Block
from jaxfleet.fluid.guards import name_scope
from jaxfleet.fluid.layer_helper import LayerHelper
from jaxfleet.fluid.no_effect import warn_no_effect
from jaxfleet.fluid.program import Program, default_main_program, program_guard
from jaxfleet.fluid.roles import OpRole
from jaxfleet.fluid.variable import Parameter, Variable

_STEPS = "@EMA_STEP_COUNTER@"
_LEAST = 1e-30  # in the place of a count of no steps, so that nothing is divided by zero


class _Runs(Protocol):
    def run(self, program: Program) -> Any: ...


class _Averages:
    """What averages share: two programs, which put them in and take them out again.

    Attributes:
        apply_program: keeps the parameters, and puts their averages in their place.
        restore_program: puts the kept parameters back.
    """

    def __init__(self, name: str | None) -> None:
        self._name = name or ""
        every = default_main_program().all_parameters()
        self._params = [param for param in every if param.do_model_average is not False]
        self.apply_program, self.restore_program = Program(), Program()

    @contextmanager
    def apply(self, executor: _Runs, need_restore: bool = True) -> Iterator[None]:
        """Puts the averages in within a `with`, and the parameters back after it if asked to."""
        executor.run(self.apply_program)
        try:
            yield
        finally:
            if need_restore:
                self.restore(executor)

    def restore(self, executor: _Runs) -> None:
        """Puts the parameters back."""
        executor.run(self.restore_program)

    def average(self, param: Parameter, block: Block) -> Variable:
        """Adds what computes a parameter's average, and returns it."""
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
    """Averages in which a step counts `decay` times as much as the next, without their bias.

    Args:
        decay: it; at most 1.
        thres_steps: how many steps were done, as a variable: early steps then decay faster, by
            `(1 + steps) / (10 + steps)` where that is less.
        name: what the averages' names begin with.
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
        """Adds what takes the parameters of a step in; called after `minimize`."""
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
        min_average_window: its least length.
        max_average_window: its most.
        regularization: warned of: averages are of parameters, which have theirs already.
        name: what the averages' names begin with.
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
        """Adds what takes the parameter of a step in."""
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
